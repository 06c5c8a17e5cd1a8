/*
Waking: no worker sleeps beside a ready task, although a NOTIFY is sent only if some worker's row says that it sleeps.

There is no poll in this model: it must not be needed as long as no process dies between its commit and its NOTIFY.
A producer stands for any process that makes tasks ready, a worker among them. A notification goes to one sleeping worker
only, and a worker without capacity passes it on. The last worker always has capacity, and only its parent loses its
session: if a parent has no session, and its workers get busy, the search of the oldest parent finds the task.
*/

#include "common.pml"

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef PRODUCERS
#define PRODUCERS 1
#endif
/* Tasks of each producer. The second one comes when the producer remembers that it saw nobody asleep. */
#ifndef TASKS
#define TASKS 2
#endif
/* Lost sessions of parents, removed rows, and workers that get busy, together. */
#ifndef FAULTS
#define FAULTS 2
#endif
#define EACH each : 0 .. WORKERS - 1

#define LOOK_FIRST (planted == 1) /* finds begun: a worker asks for news and sleeps without another look */
#define NO_SECOND_LOOK (planted == 2) /* finds begun: a worker sleeps before NEGATIVE_TTL has passed */
#define NOTIFY_FIRST (planted == 3) /* finds begun: the rows of workers are read before the commit */
#define COUNTED_LATE (planted == 4) /* finds begun: NEGATIVE_TTL is counted from the answer, not from the question */
#define NO_MISSED (planted == 5) /* finds begun: a listener with a new session does not make the worker look */
#define NO_ASK_AGAIN (planted == 6) /* finds begun: a heartbeat that makes the row anew does not make the worker ask again */
#define CLEAR_LATE (planted == 7) /* finds begun: the worker forgets its news after the look, not before */
#define KEEP_NEWS (planted == 8) /* finds begun: a worker without capacity, which was notified, wakes no other */

/* What a worker does. */
#define LOOKS 0
#define FOUND_NOTHING 1
#define ASKING 2
#define PAUSES 3
#define SLEEPS 4
#define TOOK 5

/* What a producer does. */
#define WRITES 0
#define COMMITTED 1
#define QUESTION 2
#define SILENCE 3

/* Committed tasks that are READY. */
byte ready = 0;

byte does[WORKERS];
/* feeder_wakeup, and what the worker knows: that it has asked for news, and that its row has lost this. */
bool news[WORKERS];
bool has_asked[WORKERS];
bool is_forgotten[WORKERS];
/* Whether it has no capacity, and whether it is to pass on of what it was notified. */
bool is_full[WORKERS];
bool unclaimed[WORKERS];
/* Whether NEGATIVE_TTL has passed since it has asked. */
bool has_rested[WORKERS];
/* The row of the worker, and is_sleeping in it. */
bool row[WORKERS] = true;
bool is_sleeping[WORKERS];
/* Whether the listener has a session, and a notification is on its way over it. */
bool listens[WORKERS] = true;
bool note[WORKERS];

byte produces[PRODUCERS];
byte left[PRODUCERS] = TASKS;
/* Whether the producer relies on having seen nobody asleep, and whether its NEGATIVE_TTL ended before the answer came. */
bool saw_nobody[PRODUCERS];
bool is_over[PRODUCERS];
byte faults = 0;

/* Whether a producer has read the rows before the worker asked for news, and its NEGATIVE_TTL has not passed. */
bool before[4];
#define was_before(producer, worker) before[producer * 2 + worker]

#if PRODUCERS > 1
#define all_have_forgotten(worker) (!was_before(0, worker) && !was_before(1, worker))
#else
#define all_have_forgotten(worker) !was_before(0, worker)
#endif

/* worker/child/feeder.py: run_once `feeder_wakeup.clear()`, _wake_others_if `self._heard = self._heard, {}`;
   store/claim.py: claim_statement */
inline look(me) {
    does[me] == LOOKS && !is_full[me];
    news[me] = (CLEAR_LATE -> news[me] : false);
    has_asked[me] = has_asked[me] && !is_forgotten[me];
    is_forgotten[me] = false;
    if
    :: ready > 0 ->
        ready--;
        does[me] = (has_asked[me] -> TOOK : LOOKS)
    :: else ->
        unclaimed[me] = false;
        does[me] = FOUND_NOTHING
    fi
}

/* worker/child/feeder.py: _begin `self._ask_for_no_more()`. After some uninterrupted work the worker asks for news no longer. */
inline end_sleep_when_busy(me) {
    does[me] == TOOK;
    if
    :: true ->
        has_asked[me] = false;
        is_sleeping[me] = false
    :: true
    fi;
    does[me] = LOOKS
}

/* environment: all threads of a worker get busy, with tasks that do not end */
inline fill(me) {
    me < WORKERS - 1 && does[me] == LOOKS && !is_full[me] && faults < FAULTS;
    faults++;
    is_full[me] = true
}

/* worker/child/feeder.py: _leave_to_others `self._ask_for_no_more()`; store/wake.py: wake_others, WAKE_EXCEPT */
inline pass_on(me) {
    does[me] == LOOKS && is_full[me] && unclaimed[me];
    unclaimed[me] = false;
    has_asked[me] = false;
    is_sleeping[me] = false;
    if
    :: is_sleeping[1 - me] && ready > 0 && !KEEP_NEWS -> note[1 - me] = listens[1 - me]
    :: else
    fi
}

/* worker/child/feeder.py: _sleep `not self.asks`; store/wake.py: write_sleep_flag */
inline ask_for_news(me) {
    does[me] == FOUND_NOTHING && !has_asked[me];
    is_sleeping[me] = row[me];
    byte each;
    for (each : 0 .. PRODUCERS - 1) {
        was_before(each, me) = (saw_nobody[each] || produces[each] == SILENCE) && !is_over[each]
    }
    each = 0;
    does[me] = ASKING
}

/* worker/child/feeder.py: _ask `self.asked_at = time.monotonic()` */
inline look_again(me) {
    does[me] == ASKING;
    has_asked[me] = true;
    has_rested[me] = false;
    news[me] = (CLEAR_LATE -> false : news[me]);
    does[me] = (LOOK_FIRST -> SLEEPS : LOOKS)
}

/* worker/child/feeder.py: _sleep `self._polled_at < self._notified_from` */
inline pause(me) {
    does[me] == FOUND_NOTHING && has_asked[me];
    news[me] = (CLEAR_LATE -> false : news[me]);
    does[me] = (has_rested[me] || NO_SECOND_LOOK -> SLEEPS : PAUSES)
}

/* worker/child/feeder.py: _wait `self.in_flight.feeder_wakeup.wait(seconds)`, _notified_from */
inline end_pause(me) {
    does[me] == PAUSES && (news[me] || all_have_forgotten(me));
    has_rested[me] = has_rested[me] || all_have_forgotten(me);
    does[me] = LOOKS
}

/* worker/child/feeder.py: _wait; worker/child/in_flight.py: notify_feeder */
inline wake_up(me) {
    does[me] == SLEEPS && news[me];
    does[me] = LOOKS
}

/* worker/parent/crew.py: wake; worker/child/in_flight.py: notify_feeder */
inline hear(me) {
    note[me];
    note[me] = false;
    unclaimed[me] = true;
    news[me] = true
}

/* environment: the session of the parent is lost */
inline lose_listener(me) {
    me == WORKERS - 1 && listens[me] && faults < FAULTS;
    faults++;
    listens[me] = false;
    note[me] = false
}

/* worker/parent/heartbeat.py: connected `self.workers.tell(poll=True)`; worker/child/child.py: _obey `self.in_flight.notify_feeder()` */
inline listen_again(me) {
    !listens[me];
    listens[me] = true;
    news[me] = news[me] || !NO_MISSED
}

/* store/liveness.py: delete_dead */
inline remove_row(me) {
    row[me] && faults < FAULTS;
    faults++;
    row[me] = false;
    is_sleeping[me] = false
}

/* store/liveness.py: BEAT `worker.is_sleeping`; worker/child/child.py: _note_beat `self.feeder.note_flag_unset()` */
inline beat(me) {
    if
    :: !row[me]
    :: row[me] && has_asked[me] && !is_sleeping[me] && !is_forgotten[me] && !NO_ASK_AGAIN
    fi;
    row[me] = true;
    if
    :: has_asked[me] && !NO_ASK_AGAIN -> is_forgotten[me] = true; news[me] = true
    :: else
    fi
}

/* store/enqueue.py: _wake; store/insert_tasks.py: insert_calls */
inline commit(me) {
    produces[me] == WRITES && left[me] > 0 && !NOTIFY_FIRST;
    left[me]--;
    ready++;
    produces[me] = COMMITTED
}

/* store/wake.py: _no_worker_sleeps */
inline rely_on_memory(me) {
    produces[me] == COMMITTED && saw_nobody[me];
    produces[me] = WRITES
}

/* store/wake.py: _notify `now = time.monotonic()` */
inline begin_to_ask(me) {
    (produces[me] == COMMITTED || (NOTIFY_FIRST && produces[me] == WRITES && left[me] > 0)) && !saw_nobody[me];
    is_over[me] = false;
    produces[me] = QUESTION
}

/* store/wake.py: WAKE `AND worker.is_sleeping` */
inline read_rows(me) {
    produces[me] == QUESTION;
    if
    :: is_sleeping[0] -> note[0] = listens[0]; produces[me] = WRITES
    :: is_sleeping[1] -> note[1] = listens[1]; produces[me] = WRITES
    :: !is_sleeping[0] && !is_sleeping[1] -> produces[me] = SILENCE
    fi;
    left[me] = left[me] - (NOTIFY_FIRST && produces[me] == WRITES);
    ready = ready + (NOTIFY_FIRST && produces[me] == WRITES)
}

/* store/wake.py: _notify `_no_worker_slept_at.update` */
inline remember(me) {
    produces[me] == SILENCE;
    saw_nobody[me] = !is_over[me] || COUNTED_LATE;
    is_over[me] = false;
    was_before(me, 0) = was_before(me, 0) && !COUNTED_LATE;
    was_before(me, 1) = was_before(me, 1) && !COUNTED_LATE;
    left[me] = left[me] - NOTIFY_FIRST;
    ready = ready + NOTIFY_FIRST;
    produces[me] = WRITES
}

/* store/wake.py: _no_worker_sleeps `< NEGATIVE_TTL` */
inline expire(me) {
    saw_nobody[me] || (produces[me] == SILENCE && !is_over[me]);
    is_over[me] = (produces[me] == SILENCE);
    saw_nobody[me] = false;
    was_before(me, 0) = false;
    was_before(me, 1) = false
}

proctype Feeder(byte me) {
    end_feeder: do
    :: atomic { look(me) }
    :: atomic { end_sleep_when_busy(me) }
    :: atomic { ask_for_news(me) }
    :: atomic { look_again(me) }
    :: atomic { pause(me) }
    :: atomic { end_pause(me) }
    :: atomic { wake_up(me) }
    :: atomic { pass_on(me) }
    od
}

proctype Listener(byte me) {
    end_listener: do
    :: atomic { hear(me) }
    :: atomic { lose_listener(me) }
    :: atomic { fill(me) }
    :: atomic { listen_again(me) }
    od
}

proctype Heartbeat(byte me) {
    end_heartbeat: do
    :: atomic { remove_row(me) }
    :: atomic { beat(me) }
    od
}

proctype Producer(byte me) {
    end_producer: do
    :: atomic { commit(me) }
    :: atomic { rely_on_memory(me) }
    :: atomic { begin_to_ask(me) }
    :: atomic { read_rows(me) }
    :: atomic { remember(me) }
    od
}

proctype Time(byte me) {
    end_time: do
    :: atomic { expire(me) }
    od
}

init {
    atomic {
        start();
        byte each;
        /* The search tries the last one first: a run of a history is found soonest if time stands still. */
        for (each : 0 .. PRODUCERS - 1) { run Time(each) }
        for (EACH) { run Heartbeat(each); run Listener(each); run Feeder(each) }
        for (each : 0 .. PRODUCERS - 1) { run Producer(each) }
        each = 0
    }
}

ltl begun { [] (ready > 0 -> <> (ready == 0)) }
