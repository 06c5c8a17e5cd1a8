"""Charts drawn from plain numbers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from django.template.loader import render_to_string

from django_pglock.admin.charts import HEIGHT, SMALLEST, WIDTH, Chart, Line


def chart(*lines, is_stacked=False, **about):
    moments = [f"14:0{at}" for at in range(len(lines[0].values))]
    values = {"name": "speed", "title": "Throughput", "moments": moments, "lines": lines, **about}
    return Chart(shown=lambda value: f"{value:g} a minute", is_stacked=is_stacked, **values)


def paths(drawn):
    root = ElementTree.fromstring(drawn.drawing)
    return {path.get("class"): path.get("d") for path in root.iter("path")}


def numbers(path):
    return [float(each) for each in re.findall(r"-?[0-9.]+", path)]


def test_stacked_bars_fill_the_height_of_the_chart():
    drawn = chart(Line("good", "good", [3, 0]), Line("bad", "bad", [1, 2]), is_stacked=True)
    assert drawn.top == 4
    found = paths(drawn)
    x, y, width, height, _ = numbers(found["pglock-chart-good"])
    assert (x, y, height) == (0, HEIGHT, -HEIGHT * 3 / 4)
    assert 0 < width <= WIDTH / 2
    first, second = found["pglock-chart-bad"].split("z")[:2]
    assert numbers(first)[1] == HEIGHT / 4, "the first one stands on the good ones"
    assert numbers(second)[:2] == [WIDTH / 2, HEIGHT], "an empty bar has no box"


def test_bars_of_times_stand_in_front_of_each_other_and_are_missing_where_nothing_is_known():
    drawn = chart(Line("p95", "most", [4, None]), Line("p50", "half", [1, None]))
    assert drawn.top == 4
    for kind, height in (("most", HEIGHT), ("half", HEIGHT / 4)):
        path = paths(drawn)[f"pglock-chart-{kind}"]
        assert path.count("M") == 1
        assert (numbers(path)[1], numbers(path)[3]) == (HEIGHT, -height)


def test_the_smallest_bar_can_be_seen():
    [path] = paths(chart(Line("bad", "bad", [1, 1000]))).values()
    assert numbers(path)[3] == -SMALLEST


@pytest.mark.parametrize("values", [[], [0, 0], [None, None]])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_a_chart_without_values_is_empty(values, is_stacked):
    drawn = chart(Line("none", "half", values), is_stacked=is_stacked)
    assert drawn.top == 0
    ElementTree.fromstring(drawn.drawing)


def test_screen_readers_get_a_title_and_a_table():
    drawn = chart(Line("p50", "half", [1, None]), Line("p95", "most", [5, 2.5]))
    root = ElementTree.fromstring(drawn.drawing)
    assert (root.get("role"), root.find("title").text) == ("img", "Throughput")
    page = render_to_string("admin/django_pglock/chart.html", {"chart": drawn})
    for row in ('<th scope="row">14:00</th><td>1 a minute</td><td>5 a minute</td>', "<td>-</td><td>2.5 a minute</td>"):
        assert row in page


def test_no_text_becomes_markup():
    line = Line("<b>label</b>", "half", [1])
    drawn = chart(line, title="<i>title</i>", moments=["<u>now</u>"])
    page = render_to_string("admin/django_pglock/chart.html", {"chart": drawn})
    assert not re.search("<[biu]>", page)
    assert " style=" not in page
    assert "<script" not in page
