/*
Leases: one holder at a time, tokens that only grow, and a service that refuses the writes of earlier holders.

Time passes in steps, and a lease lasts for TTL of them. A process that freezes is one whose next step comes late; its
clock goes on.
*/

#include "common.pml"

#ifndef HOLDERS
#define HOLDERS 2
#endif
#define TTL 2
/* Tokens that are given out. */
#ifndef TOKENS
#define TOKENS 3
#endif
/* Lost answers and deaths, together. */
#ifndef FAULTS
#define FAULTS 1
#endif
#define EACH each : 0 .. HOLDERS - 1

#define DEADLINE_FROM_ANSWER (planted == 1) /* finds !two_hold: the holder counts its ttl from the answer, not from the question */
#define RENEW_ANYBODYS (planted == 2) /* finds !two_hold: a renewal does not ask for holder and token */
#define RELEASE_ANYBODYS (planted == 3) /* finds !two_hold: a release does not ask for holder and token */
#define TAKES_UNEXPIRED (planted == 4) /* finds !two_hold: a lease is taken that has not ended */
#define SAME_TOKEN (planted == 5) /* finds !token_not_new: the token does not grow */
#define NO_TOKEN_CHECK (planted == 6) /* finds !overwritten: the service does not look at the token */
#define NO_CLOCK (planted == 7) /* finds !two_hold: the holder does not look at its clock */
#define NO_UNDO (planted == 8) /* finds lease_is_taken: an acquire whose answer was lost is not undone */

#define NOBODY 255

/* The row. "left" is expires_at as steps from now on. */
byte holder = NOBODY;
byte token = 0;
byte left = 0;
/* Leases without a ttl have no end. */
bool has_ttl = true;

#define IDLE 0
#define ACQUIRING 1
#define GRANTED 2
#define TOO_LATE 3
#define HOLDS 4
#define RENEWING 5
#define EXTENDED 6
#define REVOKED 7
#define UNDOING 8
#define DEAD 9
byte does[HOLDERS];
byte my_token[HOLDERS];
/* Steps until the deadline of the holder, and until the one that an answer will set. */
byte deadline[HOLDERS];
byte next_deadline[HOLDERS];
/* Whether the process has looked at its clock, and is about to write to the service. */
bool is_writing[HOLDERS];
bool is_lost[HOLDERS];
/* The largest token that the service has seen, and who wrote last. */
byte seen = 0;
byte faults = 0;

/* For one step; the same before and after it. */
byte each = 0;

bool two_hold = false;
bool token_not_new = false;
bool overwritten = false;
/* The largest token that was ever given out, and the one of the last write. */
byte last_token = 0;
byte last_write = 0;

#define believes(me) ((does[me] == HOLDS || does[me] == RENEWING || does[me] == EXTENDED || does[me] == REVOKED) && !is_lost[me] && (!has_ttl || deadline[me] > 0 || NO_CLOCK))
#define is_free (left == 0)
#define never_ends 255

inline check() {
    must_not(two_hold, believes(0) && believes(1))
}

/* locks/lease_thread.py: _try `began = boottime()` */
inline ask(me) {
    does[me] == IDLE;
    next_deadline[me] = TTL;
    does[me] = ACQUIRING
}

/* locks/lease_thread.py: ACQUIRE `WHERE l.expires_at <= GREATEST(`, ACQUIRE `token = l.token + 1` */
inline acquire(me) {
    does[me] == ACQUIRING && token < TOKENS;
    if
    :: is_free || TAKES_UNEXPIRED ->
        token = token + !SAME_TOKEN;
        must_not(token_not_new, token <= last_token);
        last_token = token;
        holder = me;
        left = (has_ttl -> TTL : never_ends);
        my_token[me] = token;
        does[me] = GRANTED
    :: else -> does[me] = TOO_LATE
    fi
}

/* locks/lease_thread.py: _try `self._deadline = began + self.ttl` */
inline hear_of_grant(me) {
    does[me] == GRANTED;
    deadline[me] = (DEADLINE_FROM_ANSWER -> TTL : next_deadline[me]);
    is_lost[me] = false;
    does[me] = HOLDS;
    check()
}

/* locks/lease_thread.py: acquire */
inline hear_of_refusal(me) {
    does[me] == TOO_LATE;
    does[me] = IDLE
}

/* environment: the answer of an acquire is lost, and the acquire is executed or not; locks/lease_thread.py: release_unused `if self._may_hold:` */
inline lose_answer(me) {
    does[me] == GRANTED && faults < FAULTS;
    faults++;
    does[me] = (NO_UNDO -> IDLE : UNDOING)
}

/* locks/lease_thread.py: release_unused `await self.release()`, OURS `holder = %(holder)s` */
inline undo(me) {
    does[me] == UNDOING;
    left = (holder == me && my_token[me] == token -> 0 : left);
    does[me] = IDLE
}

/* locks/lease_thread.py: _renew `began = boottime()` */
inline ask_to_renew(me) {
    does[me] == HOLDS && has_ttl && !is_lost[me];
    next_deadline[me] = TTL;
    does[me] = RENEWING
}

/* locks/lease_thread.py: RENEW `AND expires_at > clock_timestamp()`, OURS `holder = %(holder)s` */
inline renew(me) {
    does[me] == RENEWING;
    if
    :: left > 0 && ((holder == me && token == my_token[me]) || RENEW_ANYBODYS) ->
        left = TTL;
        does[me] = EXTENDED
    :: else -> does[me] = REVOKED
    fi
}

/* locks/lease_thread.py: _renew `self._deadline = began + (self.ttl or 0)` */
inline hear_of_renewal(me) {
    does[me] == EXTENDED;
    deadline[me] = (DEADLINE_FROM_ANSWER -> TTL : next_deadline[me]);
    does[me] = HOLDS;
    check()
}

/* locks/lease_thread.py: _renew `self._lose(REVOKED)` */
inline hear_of_loss(me) {
    does[me] == REVOKED;
    is_lost[me] = true;
    does[me] = HOLDS
}

/* environment: the answer of a renewal is lost; locks/lease_thread.py: _keep_renewing */
inline lose_answer_of_renewal(me) {
    (does[me] == EXTENDED || does[me] == REVOKED) && faults < FAULTS;
    faults++;
    does[me] = HOLDS
}

/* locks/lease_thread.py: RELEASE `expires_at = greatest(t, least(t, acquired_at) +`, OURS `released_at IS NULL` */
inline release(me) {
    does[me] == HOLDS && !is_writing[me];
    if
    :: left > 0 && ((holder == me && token == my_token[me]) || RELEASE_ANYBODYS) ->
        left = 0
    :: else
    fi;
    does[me] = IDLE
}

/* locks/lease_thread.py: is_lost `boottime() >= self._deadline` */
inline look_at_clock(me) {
    does[me] == HOLDS && believes(me) && !is_writing[me];
    is_writing[me] = true
}

/* environment: the service accepts no token that is smaller than the largest one it has seen; locks/leases.py: token */
inline write(me) {
    does[me] == HOLDS && is_writing[me];
    is_writing[me] = false;
    if
    :: my_token[me] >= seen || NO_TOKEN_CHECK ->
        must_not(overwritten, my_token[me] < last_write);
        last_write = my_token[me];
        seen = my_token[me]
    :: else
    fi
}

/* environment: SIGKILL */
inline die(me) {
    does[me] != DEAD && faults < FAULTS && has_ttl;
    faults++;
    does[me] = DEAD
}

/* environment: time passes for everybody, also for who is frozen */
inline tick() {
    has_ttl;
    left = (left > 0 -> left - 1 : 0);
    for (EACH) {
        deadline[each] = (deadline[each] > 0 -> deadline[each] - 1 : 0);
        next_deadline[each] = (next_deadline[each] > 0 -> next_deadline[each] - 1 : 0)
    }
    each = 0
}

proctype Holder(byte me) {
    end_holder: do
    :: atomic { ask(me) }
    :: atomic { acquire(me) }
    :: atomic { hear_of_grant(me) }
    :: atomic { hear_of_refusal(me) }
    :: atomic { lose_answer(me) }
    :: atomic { undo(me) }
    :: atomic { hear_of_renewal(me) }
    :: atomic { hear_of_loss(me) }
    :: atomic { lose_answer_of_renewal(me) }
    :: atomic { look_at_clock(me) }
    :: atomic { write(me) }
    :: atomic { die(me) }
    :: atomic { release(me) }
    od
}

proctype Renewal(byte me) {
    end_renewal: do
    :: atomic { ask_to_renew(me) }
    :: atomic { renew(me) }
    od
}

proctype Time() {
    end_time: do
    :: atomic { tick() }
    od
}

init {
    atomic {
        start();
        if :: true :: has_ttl = false fi;
        for (EACH) { run Holder(each); run Renewal(each) }
        each = 0;
        run Time()
    }
}

ltl lease_is_taken { [] <> (is_free || believes(0) || believes(1) || token == TOKENS) }
