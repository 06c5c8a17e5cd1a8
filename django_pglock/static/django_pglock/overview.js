// Loads the part of the overview that changes, every five seconds while the page is visible.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const overview = document.getElementById("pglock-overview");
  const button = document.getElementById("pglock-pause");
  const news = document.getElementById("pglock-news");
  if (!overview || !button || !news) return;

  const INTERVAL = 5000;
  // Whoever prefers less motion gets a page that stands still, and a button that starts the refresh.
  let isPaused = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  let timer = null;
  let isLost = false;

  const keys = (root) => new Set([...root.querySelectorAll("[data-key]")].map((each) => each.dataset.key));

  // Only new problems are announced: counts and times change with every refresh.
  const announce = (before) => {
    const found = [...overview.querySelectorAll("[data-key]")].filter((each) => !before.has(each.dataset.key));
    if (found.length || isLost) news.textContent = found.map((each) => each.textContent).join(" ");
  };

  const isInUse = () => {
    if (overview.contains(document.activeElement) && document.activeElement.closest("form")) return true;
    const selection = window.getSelection();
    return selection && !selection.isCollapsed && overview.contains(selection.anchorNode);
  };

  // The new content has the same tables open, and the same link or table focused, as the old one.
  const replace = (nodes) => {
    const before = keys(overview);
    const open = [...overview.querySelectorAll("details[open]")].map((each) => each.id);
    const focused = [...overview.querySelectorAll("a, summary, [tabindex], select, button")];
    const at = focused.indexOf(document.activeElement);
    const address = at < 0 ? null : document.activeElement.getAttribute("href");
    const scrolled = [...overview.querySelectorAll(".pglock-scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
    overview.replaceChildren(...nodes);
    open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
    overview.querySelectorAll(".pglock-scroll").forEach((each, number) => {
      if (scrolled[number]) [each.scrollLeft, each.scrollTop] = scrolled[number];
    });
    if (at >= 0) {
      const found = [...overview.querySelectorAll("a, summary, [tabindex], select, button")];
      const same = address && found.find((each) => each.getAttribute("href") === address);
      (same || found[Math.min(at, found.length - 1)])?.focus({ preventScroll: true });
    }
    announce(before);
  };

  // A document of XMLHttpRequest runs no script, so it is allowed under a policy that requires trusted types.
  const ask = (url) =>
    new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("GET", url);
      request.responseType = "document";
      request.onerror = reject;
      // Another address is that of the form to log in.
      request.onload = () =>
        request.status === 200 && request.responseURL === new URL(url, location).href
          ? resolve(request.response.getElementById("pglock-overview").childNodes)
          : reject(request.status);
      request.send();
    });

  const load = async () => {
    if (!isInUse()) {
      try {
        const nodes = await ask(location.pathname + location.search);
        if (isPaused || document.hidden) return;
        replace(nodes);
        isLost = false;
      } catch {
        // No connection, or the session has ended. What is shown may be old, and the page says so.
        if (!isLost) news.textContent = news.dataset.lost;
        isLost = true;
      }
    }
    plan();
  };

  const plan = () => {
    clearTimeout(timer);
    if (!isPaused && !document.hidden) timer = setTimeout(load, INTERVAL);
  };

  const label = () => {
    button.textContent = isPaused ? button.dataset.resume : button.dataset.pause;
  };

  button.addEventListener("click", () => {
    isPaused = !isPaused;
    label();
    plan();
  });
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!isPaused && !document.hidden) load();
  });
  label();
  button.hidden = false;
  plan();
});
