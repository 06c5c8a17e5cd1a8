/*
What all models share: faults that can be planted, and observed events.

A transition is an inline. The comment above it names the statements and functions that it stands for, and quotes the
clause that it relies on. A test looks them up in the package.

A transition that changes a row is observed. With TRACE, only such runs count in which the observed transitions are those
of a recorded history, in its order; all other transitions are free.
*/

byte planted;

inline start() {
    planted = c_expr { (getenv("PLANTED") ? atoi(getenv("PLANTED")) : 0) };
    choose_history()
}

/* What must never be is a flag, so that the checker names it. */
#define must_not(flag, when) flag = flag || (when); assert(!flag)

#ifdef TRACE

#include "histories.pml"

byte history;
short position;
/* The position of a run that differs from the history, or has come to its end. Nothing happens any more. */
#define OVER 32000
/* The search for a run of one history ends with the first. This is no part of the state. */
c_decl { static int is_accepted[HISTORIES]; };
#define while_observed provided (position != OVER && c_expr { !is_accepted[now.history] })

inline choose_history() {
    select(history : 0 .. HISTORIES - 1);
    position = first[history]
}

inline observe(kind, who, number) {
    if
    :: position < first[history + 1] && kinds[position] == kind && whose[position] == who && numbers[position] == number ->
        position++;
        if
        :: position == first[history + 1] -> c_code { is_accepted[now.history] = 1; printf("accepted %d\n", now.history); }; position = OVER
        :: else
        fi
    :: else -> position = OVER
    fi
}

#else

inline choose_history() { skip }
inline observe(kind, who, number) { skip }
#define while_observed

#endif
