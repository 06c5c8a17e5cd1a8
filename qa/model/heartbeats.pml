/*
Which workers are dead: heartbeats, session locks, the parent as its own witness, and the rescue that relies on them.

A process of the model is a parent with one child. Time passes in heartbeat intervals. An interval ends when every parent
that runs and reaches the server has written its heartbeat: this is what the model assumes of a living parent, and
docs/guarantees.md says what it takes.
*/

#include "common.pml"

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#define EACH each : 0 .. WORKERS - 1

#define NO_WITNESS (planted == 1) /* finds !living_condemned: silence proves a death while all are silent */
#define SEAMLESS (planted == 2) /* finds !living_condemned: heartbeats in a new session continue those of the last one */
#define NO_SESSION (planted == 3) /* finds !frozen_condemned: two missing heartbeats are enough although the session is there */
#define NO_LIMIT (planted == 4) /* finds claims_come_back: a session keeps a frozen worker alive forever */
#define NO_UPKEEP (planted == 5) /* finds claims_come_back: nobody looks for claims of dead workers */
#define DELETE_OWNERS (planted == 6) /* finds !living_condemned: rows of silent workers are deleted without a witness */
#define NO_STEP (planted == 7) /* finds !living_condemned: a step of the server's clock is no interruption */
#define KEEP_GHOST (planted == 8) /* finds claims_come_back: the row of an ended child, inserted again by a late heartbeat, stays */

/* Intervals: two heartbeats missed, the hard limit, a late heartbeat. */
#define MISSED 3
#define LIMIT 4
#define LATE 1

#define RUNS 0
#define FROZEN 1
#define DEAD 2

/* Besides RUNS, for a child: it has ended, and its row has been deleted. */
#define ENDED 1
#define GONE 2

byte process[WORKERS];
byte child[WORKERS];
bool is_cut[WORKERS];
/* A session that holds the lock of the parent. */
bool session[WORKERS];
/* The row of the child: whether it is there, and heartbeat_at as intervals since then. */
bool row[WORKERS];
byte age[WORKERS];
/* What the parent knows by its own clock: intervals since its last heartbeat, and since the last interruption. */
byte gap[WORKERS];
byte steady[WORKERS];
/* Whether the server's clock has been put forward since the parent has looked at it. */
bool is_stepped[WORKERS];
bool has_beaten[WORKERS];
/* Whether a heartbeat of the child was written: it claims nothing before. */
bool has_begun[WORKERS];
/* Whether the child has a RUNNING task. */
bool owns[WORKERS];
bool is_up = true;
byte faults = 0;

/* Whole intervals for which the parent was frozen or cut off while the server was there. */
byte absent[WORKERS];

bool living_condemned = false;
bool frozen_condemned = false;

#define reaches(me) (process[me] == RUNS && is_up && !is_cut[me])

/* worker/parent/heartbeat.py: unbroken_for `return 0.0`; store/rescue.py: rescue `missing() if unbroken >= missing() else math.inf` */
#define can_witness(me, silence) (NO_WITNESS || (gap[me] <= LATE && steady[me] >= silence))

/* store/rescue.py: RESCUE `OR worker.lock_key IN (SELECT number FROM held WHERE is_working)`, HELD_LOCKS */
#define works(me) (session[me] && reaches(me))
#define is_alive(by, me) (row[me] && (age[me] < MISSED || !can_witness(by, MISSED) || (session[me] && !NO_SESSION && (age[me] < LIMIT || NO_LIMIT || !can_witness(by, LIMIT))) || works(me)))

/* store/liveness.py: BEAT `DELETE FROM {{worker}} WHERE id IN (SELECT id FROM gone)`, LOCK_PARENT;
   worker/parent/heartbeat.py: _note_success `if self._unbroken_since == math.inf or` */
inline beat(me) {
    reaches(me) && !has_beaten[me];
    if
    :: (!session[me] || gap[me] > LATE) && !SEAMLESS -> steady[me] = 0
    :: else
    fi;
    session[me] = true;
    if
    :: child[me] == RUNS -> row[me] = true; age[me] = 0; has_begun[me] = true
    :: else -> row[me] = row[me] && (KEEP_GHOST || child[me] == ENDED)
    fi;
    gap[me] = 0;
    absent[me] = 0;
    has_beaten[me] = true
}

/* store/claim.py: claim_statement; worker/child/child.py: _note_beat `self.feeder.start()` */
inline claim(me) {
    reaches(me) && child[me] == RUNS && !owns[me] && has_begun[me];
    owns[me] = true
}

/* store/settle.py: settle */
inline settle(me) {
    reaches(me) && child[me] == RUNS && owns[me];
    owns[me] = false
}

/* worker/parent/upkeep.py: _notice_step_of_clock `self._stepped_at = after` */
inline notice_step(by) {
    if
    :: is_stepped[by] && !NO_STEP -> steady[by] = 0
    :: else
    fi;
    is_stepped[by] = false
}

/* store/rescue.py: RESCUE `AND NOT EXISTS (SELECT FROM alive WHERE alive.id = busy.worker)` */
inline rescue(by, me) {
    reaches(by) && owns[me] && !is_alive(by, me) && !NO_UPKEEP;
    notice_step(by);
    if
    :: is_alive(by, me)
    :: else ->
        must_not(living_condemned, process[me] == RUNS && child[me] == RUNS && absent[me] == 0);
        must_not(frozen_condemned, process[me] != DEAD && child[me] == RUNS && session[me] && absent[me] < LIMIT - 1);
        owns[me] = false
    fi
}

/* store/liveness.py: delete_dead `if unbroken >= limit else 0`, DELETE_DEAD */
inline delete_dead(by, me) {
    reaches(by) && row[me] && age[me] >= LIMIT && ((!owns[me] && can_witness(by, LIMIT)) || DELETE_OWNERS);
    notice_step(by);
    row[me] = row[me] && !(can_witness(by, LIMIT) || DELETE_OWNERS)
}

/* worker/parent/upkeep.py: _end_workers; store/liveness.py: deregister */
inline end_child(me) {
    child[me] == ENDED && reaches(me);
    row[me] = false;
    child[me] = GONE
}

/* store/liveness.py: BEAT `task_paths IS NOT NULL AND NOT EXISTS`. It was sent before the child had ended. */
inline beat_late(me) {
    child[me] == GONE && reaches(me) && faults < FAULTS;
    faults++;
    row[me] = true;
    age[me] = 0
}

/* worker/parent/crew.py: _replace_after_end `self._start_later`. The next child has another row. */
inline replace_child(me) {
    child[me] == GONE && reaches(me) && !row[me] && !owns[me];
    has_begun[me] = false;
    child[me] = RUNS
}

#define may_end(me) (!reaches(me) || has_beaten[me])

/* environment: an interval ends */
inline tick() {
#if WORKERS > 2
    may_end(0) && may_end(1) && may_end(2);
#else
    may_end(0) && may_end(1);
#endif
    byte each;
    for (EACH) {
        has_beaten[each] = false;
        age[each] = (age[each] < LIMIT -> age[each] + 1 : LIMIT);
        gap[each] = (gap[each] < LIMIT -> gap[each] + 1 : LIMIT);
        steady[each] = (steady[each] < LIMIT -> steady[each] + 1 : LIMIT);
        absent[each] = (is_up && (process[each] == FROZEN || is_cut[each]) && absent[each] < LIMIT -> absent[each] + 1 : absent[each])
    }
    each = 0
}

/* environment: the server's clock is put forward. All heartbeats seem to be old. */
inline step_clock() {
    is_up && faults < FAULTS;
    faults++;
    byte each;
    for (EACH) {
        age[each] = LIMIT;
        is_stepped[each] = true
    }
    each = 0
}

/* environment: a child is killed. Its parent sees this at once. */
inline kill_child(me) {
    process[me] == RUNS && child[me] == RUNS && faults < FAULTS;
    faults++;
    child[me] = ENDED
}

/* environment: SIGKILL. The server notices that the session is gone. */
inline die(me) {
    process[me] != DEAD && faults < FAULTS;
    faults++;
    process[me] = DEAD;
    session[me] = false
}

/* environment: its host is lost. The server keeps the session. */
inline die_unnoticed(me) {
    process[me] != DEAD && session[me] && faults < FAULTS;
    faults++;
    process[me] = DEAD
}

/* environment: SIGSTOP, a suspended machine */
inline freeze(me) {
    process[me] == RUNS && faults < FAULTS;
    faults++;
    process[me] = FROZEN
}

/* environment: SIGCONT */
inline thaw(me) {
    process[me] == FROZEN;
    process[me] = RUNS
}

/* environment: the session of the heartbeat is lost. The next heartbeat has a new one. */
inline lose_session(me) {
    session[me] && faults < FAULTS;
    faults++;
    session[me] = false
}

/* environment: no session reaches the server, until the network is mended */
inline cut_off(me) {
    !is_cut[me] && faults < FAULTS;
    faults++;
    is_cut[me] = true;
    session[me] = false
}

/* environment: the network is mended */
inline mend(me) {
    is_cut[me];
    is_cut[me] = false
}

/* environment: the server crashes */
inline crash() {
    is_up && faults < FAULTS;
    faults++;
    is_up = false;
    byte each;
    for (EACH) { session[each] = false }
    each = 0
}

/* environment: the server is back */
inline restart() {
    !is_up;
    is_up = true
}

proctype Heartbeat(byte me) {
    end_heartbeat: do
    :: atomic { beat(me) }
    od
}

proctype Worker(byte me) {
    end_worker: do
    :: atomic { claim(me) }
    :: atomic { settle(me) }
    od
}

proctype Children(byte me) {
    end_children: do
    :: atomic { end_child(me) }
    :: atomic { replace_child(me) }
    od
}

proctype Upkeep(byte by) {
    end_upkeep: do
    :: atomic { rescue(by, 0) }
    :: atomic { rescue(by, 1) }
    :: atomic { delete_dead(by, 0) }
    :: atomic { delete_dead(by, 1) }
    od
}

/* The last parent is spared, so that somebody is there to rescue. */
proctype Faults(byte me) {
    end_faults: do
    :: atomic { me < WORKERS - 1 -> die(me) }
    :: atomic { me < WORKERS - 1 -> die_unnoticed(me) }
    :: atomic { me < WORKERS - 1 -> freeze(me) }
    :: atomic { thaw(me) }
    :: atomic { lose_session(me) }
    :: atomic { me < WORKERS - 1 -> cut_off(me) }
    :: atomic { mend(me) }
    :: atomic { kill_child(me) }
    :: atomic { beat_late(me) }
    od
}

proctype Time() {
    end_time: do
    :: atomic { tick() }
    od
}

proctype Server() {
    end_server: do
    :: atomic { crash() }
    :: atomic { step_clock() }
    :: atomic { restart() }
    od
}

init {
    atomic {
        start();
        byte each;
        for (EACH) {
            run Heartbeat(each); run Worker(each); run Children(each); run Upkeep(each); run Faults(each)
        }
        each = 0;
        run Time();
        run Server()
    }
}

ltl claims_come_back { [] (((process[0] != RUNS || child[0] != RUNS) && owns[0]) -> <> ((process[0] == RUNS && child[0] == RUNS) || !owns[0])) }
