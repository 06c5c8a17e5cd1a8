/*
What all models share: faults that can be planted.

A transition is an inline. The comment above it names the statements and functions that it stands for, and quotes the
clause that it relies on. A test looks them up in the package.
*/

byte planted;

inline start() {
    planted = c_expr { (getenv("PLANTED") ? atoi(getenv("PLANTED")) : 0) }
}

/* What must never be is a flag, so that the checker names it. */
#define must_not(flag, when) flag = flag || (when); assert(!flag)
