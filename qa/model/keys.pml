/*
Lock keys: which of the tasks with one key may run.

The tasks of one key that admits one task at a time, in the order of their ids; whoever admits to it; people who cancel;
and crashes of the server, which forgets the last commits of admissions: these do not wait for the disk.
A process that freezes is one whose next step comes late.
*/

#include "common.pml"

#ifndef TASKS
#define TASKS 2
#endif
/* Processes that admit at once. */
#ifndef ADMITTERS
#define ADMITTERS 2
#endif
/* Deaths between a commit and the admission, crashes of the server, rollbacks, retries and rescues, together. */
#ifndef FAULTS
#define FAULTS 2
#endif
#define EACH each : 0 .. TASKS - 1

#define NO_LOCK (planted == 1) /* finds !two_at_once: several processes admit to the key at once */
#define SNAPSHOT_FIRST (planted == 2) /* finds !two_at_once: the snapshot is older than the lock of the key */
#define RETRY_LEAVES_KEY (planted == 3) /* finds !two_at_once: a task that will be retried leaves the key to others */
#define PASSES_LOCKED (planted == 4) /* finds !overtaken: a task is admitted past a row that somebody has locked */
#define LOOKS_ALONE (planted == 5) /* finds !two_at_once: a call writes READY without the lock of the key */
#define ADMIT_FIRST (planted == 6) /* finds begun: the admission looks before the end of the task is committed */
#define NO_UPKEEP (planted == 7) /* finds begun: nobody repairs what a death or a crash has left */

#define NOT_THERE 0
#define BLOCKED 1
#define READY 2
#define RUNNING 3
#define SCHEDULED 4
#define FINISHED 5

#define NOBODY 255

byte status[TASKS];
/* Written in a transaction that is not committed. */
bool is_new[TASKS];
/* Written together with the admission, under the lock of the key. */
bool is_at_key[TASKS];
/* The row is locked by the open transaction of a person. */
bool is_locked[TASKS];
/* A commit of READY that is not on the disk yet. */
bool is_unsynced[TASKS];
/* Who has the advisory lock of the key; an admitter or, from ADMITTERS on, a call. */
byte key_lock = NOBODY;
/* Calls of admit() and admit_one() that are to come. */
byte owed = 0;
bool owed_own[TASKS];
byte faults = 0;
/* Without upkeep there are no faults. */
bool has_upkeep = true;

#define IDLE 0
#define ASKED 1
#define LOCKED 2
#define LOOKED 3
byte does[ADMITTERS];
/* The task that asks for itself, NOBODY for the general statement; and the task to admit. */
byte own[ADMITTERS];
byte chosen[ADMITTERS];
/* Whether the snapshot leaves something to the general statement. */
bool leaves[ADMITTERS];

/* For one step; the same before and after it. */
byte each = 0;
byte count = 0;
byte other = 0;
/* Whether a person has cancelled already, or nobody will. */
bool cancels = false;
bool leaves_it[TASKS];

bool two_at_once = false;
bool overtaken = false;

#define is_admitted(task) (status[task] == READY || status[task] == RUNNING)
#define is_unfinished(task) (!is_new[task] && status[task] != NOT_THERE && status[task] != FINISHED)

inline check() {
    count = 0;
    for (EACH) { count = count + (is_admitted(each) || status[each] == SCHEDULED) }
    each = 0;
    must_not(two_at_once, count > 1);
    count = 0
}

/* Every commit but those of admissions waits until the log is on the disk, with all commits before it. */
inline sync() {
    for (EACH) { is_unsynced[each] = false }
    each = 0
}

/* store/insert_tasks.py: columns_of `columns["status"] = "'BLOCKED'"` */
inline insert(task) {
    status[task] == NOT_THERE && (task == 0 || status[task - 1] != NOT_THERE);
    status[task] = BLOCKED;
    is_new[task] = true
}

/* store/enqueue.py: _admit_on_commit */
inline commit_insert(task) {
    is_new[task] && !is_at_key[task];
    is_new[task] = false;
    owed_own[task] = true;
    sync()
}

/* store/enqueue.py: enqueue_statement, _gate `NOT EXISTS (SELECT FROM other)`; store/admit.py: LOCK_KEY */
inline enqueue_one(task) {
    status[task] == NOT_THERE && (task == 0 || status[task - 1] != NOT_THERE) && (key_lock == NOBODY || LOOKS_ALONE);
    count = 0;
    other = NOT_THERE;
    for (EACH) {
        if
        :: is_unfinished(each) && (other == NOT_THERE || is_admitted(each)) -> other = status[each]
        :: else
        fi
    }
    each = 0;
    if
    :: other == NOT_THERE -> status[task] = READY
    :: else -> status[task] = BLOCKED
    fi;
    key_lock = (LOOKS_ALONE -> key_lock : ADMITTERS + task);
    is_new[task] = true;
    is_at_key[task] = true;
    /* store/enqueue.py: _gate `SELECT status IN ('READY', 'RUNNING') FROM other`: then the end of that task admits. */
    leaves_it[task] = (other != READY && other != RUNNING && other != NOT_THERE);
    other = 0
}

/* store/enqueue.py: enqueue `after_commit(using, admit_next, using, [call.lock], is_rated=task.rate is not None)` */
inline commit_enqueue_one(task) {
    is_new[task] && is_at_key[task];
    is_new[task] = false;
    is_at_key[task] = false;
    key_lock = (LOOKS_ALONE -> key_lock : NOBODY);
    owed = owed + leaves_it[task];
    leaves_it[task] = false;
    check();
    sync()
}

/* store/claim.py: claim_statement */
inline claim(task) {
    status[task] == READY && !is_new[task];
    status[task] = RUNNING;
    sync()
}

/* store/settle.py: settle; worker/child/settler.py: _release_and_admit */
inline finish(task) {
    status[task] == RUNNING;
    status[task] = FINISHED;
    owed = owed + !ADMIT_FIRST;
    sync()
}

/* store/settle.py: SETTLE_OTHERS `THEN 'BLOCKED'`; store/outcome.py: Retried; worker/child/settler.py: _release_and_admit */
inline retry(task) {
    status[task] == RUNNING && faults < FAULTS;
    faults++;
    status[task] = SCHEDULED;
    owed++;
    sync()
}

/* store/release.py: promote `admit_on_commit(using` */
inline promote(task) {
    status[task] == SCHEDULED;
    status[task] = BLOCKED;
    owed++;
    sync()
}

/* store/rescue.py: RESCUE `WHEN task.lock_key IS NOT NULL THEN 'BLOCKED'`, rescue; store/settle.py: GIVE_BACK */
inline rescue(task) {
    status[task] == RUNNING && faults < FAULTS;
    faults++;
    status[task] = BLOCKED;
    owed++;
    sync()
}

/* store/operate.py: _change_free; store/marking.py: first_free */
inline lock_row(task) {
    status[task] == BLOCKED && !is_new[task] && !is_locked[task] && !cancels;
    cancels = true;
    is_locked[task] = true
}

/* store/operate.py: _change_free `admit_on_commit(rows.db` */
inline commit_cancel(task) {
    is_locked[task];
    is_locked[task] = false;
    status[task] = FINISHED;
    owed++;
    sync()
}

/* environment: a person's transaction is rolled back, and nobody admits after it */
inline roll_back(task) {
    is_locked[task] && faults < FAULTS;
    faults++;
    is_locked[task] = false
}

/* store/admit.py: admit */
inline begin_to_admit(me) {
    does[me] == IDLE && owed > 0;
    owed--;
    own[me] = NOBODY;
    does[me] = ASKED
}

/* store/enqueue.py: admit_one */
inline begin_to_admit_one(me, task) {
    does[me] == IDLE && owed_own[task];
    owed_own[task] = false;
    own[me] = task;
    does[me] = ASKED
}

/* environment: the process dies between its commit and its admission */
inline die_before_admission(me) {
    does[me] == ASKED && faults < FAULTS;
    faults++;
    does[me] = IDLE
}

/* store/admit.py: LOCK_KEY, LOCK_KEYS `pg_advisory_xact_lock` */
inline lock_key_of(me) {
    (does[me] == ASKED && (key_lock == NOBODY || NO_LOCK) && !SNAPSHOT_FIRST) || (SNAPSHOT_FIRST && does[me] == LOOKED && key_lock == NOBODY);
    key_lock = me;
    does[me] = (SNAPSHOT_FIRST -> LOOKED + 1 : LOCKED)
}

/* store/admit.py: ADMIT_NEXT `LEFT JOIN LATERAL`, ADMIT; store/enqueue.py: _gate `NOT EXISTS (SELECT FROM other)` */
inline take_snapshot(me) {
    does[me] == LOCKED || (SNAPSHOT_FIRST && does[me] == ASKED);
    chosen[me] = NOBODY;
    other = NOT_THERE;
    for (EACH) {
        if
        :: is_unfinished(each) && each != own[me] && (status[each] != SCHEDULED || !RETRY_LEAVES_KEY) &&
           (status[each] != BLOCKED || own[me] != NOBODY) && (other == NOT_THERE || is_admitted(each)) -> other = status[each]
        :: else
        fi
    }
    for (EACH) {
        if
        :: is_unfinished(each) && status[each] == BLOCKED && other == NOT_THERE && chosen[me] == NOBODY &&
           (own[me] == NOBODY || own[me] == each) && (!is_locked[each] || !PASSES_LOCKED) ->
            chosen[me] = each
        :: else
        fi
    }
    for (EACH) { must_not(overtaken, chosen[me] != NOBODY && each < chosen[me] && is_unfinished(each)) }
    each = 0;
    /* store/enqueue.py: _gate `SELECT status IN ('READY', 'RUNNING') FROM other` */
    leaves[me] = own[me] != NOBODY && other != NOT_THERE && other != READY && other != RUNNING;
    other = 0;
    does[me] = LOOKED
}

/* store/admit.py: ADMIT_NEXT `FOR NO KEY UPDATE SKIP LOCKED`; store/enqueue.py: _OWN `AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''` */
inline update(me) {
    does[me] == LOOKED + SNAPSHOT_FIRST;
    if
    :: chosen[me] != NOBODY && status[chosen[me]] == BLOCKED && !is_locked[chosen[me]] ->
        status[chosen[me]] = READY;
        is_unsynced[chosen[me]] = true;
        check()
    :: chosen[me] != NOBODY && is_locked[chosen[me]] -> owed = owed + (own[me] != NOBODY)
    :: else
    fi;
    owed = owed + leaves[me];
    leaves[me] = false;
    chosen[me] = NOBODY;
    key_lock = (key_lock == me -> NOBODY : key_lock);
    does[me] = IDLE
}

/* worker/parent/upkeep.py: _orphaned_keys; store/admit.py: BLOCKED_KEYS */
inline find_orphaned_key() {
    has_upkeep && !NO_UPKEEP && owed == 0;
    for (EACH) { count = count + (is_unfinished(each) && status[each] == BLOCKED) }
    each = 0;
    owed = (count > 0);
    count = 0
}

/* environment: the server crashes. What was not on the disk is gone: open transactions, commits of admissions, locks.
   Whoever wanted to admit gets an error. store/admit.py: unsynced `SET LOCAL synchronous_commit = off` */
inline crash() {
    faults < FAULTS;
    faults++;
    for (EACH) {
        status[each] = (is_new[each] -> FINISHED : (is_unsynced[each] -> BLOCKED : status[each]));
        is_new[each] = false;
        is_at_key[each] = false;
        is_unsynced[each] = false;
        is_locked[each] = false;
        owed_own[each] = false;
        leaves_it[each] = false
    }
    for (each : 0 .. ADMITTERS - 1) { does[each] = IDLE; leaves[each] = false; chosen[each] = NOBODY }
    each = 0;
    key_lock = NOBODY;
    owed = 0;
    check()
}

proctype Task(byte me) {
    end_task: do
    :: atomic { insert(me) }
    :: atomic { enqueue_one(me) }
    :: atomic { commit_insert(me) }
    :: atomic { commit_enqueue_one(me) }
    :: atomic { claim(me) }
    :: atomic { finish(me) }
    :: atomic { retry(me) }
    :: atomic { promote(me) }
    :: atomic { rescue(me) }
    od
}

proctype Person(byte me) {
    end_person: do
    :: atomic { lock_row(me) }
    :: atomic { commit_cancel(me) }
    :: atomic { roll_back(me) }
    od
}

proctype Admitter(byte me) {
    end_admitter: do
    :: atomic { begin_to_admit(me) }
    :: atomic { begin_to_admit_one(me, 0) }
    :: atomic { begin_to_admit_one(me, 1) }
#if TASKS > 2
    :: atomic { begin_to_admit_one(me, 2) }
#endif
    :: atomic { die_before_admission(me) }
    :: atomic { lock_key_of(me) }
    :: atomic { take_snapshot(me) }
    :: atomic { update(me) }
    od
}

proctype Upkeep() {
    end_upkeep: do
    :: atomic { find_orphaned_key() }
    od
}

proctype Server() {
    end_server: do
    :: atomic { crash() }
    od
}

init {
    atomic {
        start();
        if
        :: true
        :: has_upkeep = false; faults = FAULTS
        fi;
        if :: true :: cancels = true fi;
        for (EACH) { run Task(each); run Person(each) }
        for (each : 0 .. ADMITTERS - 1) { own[each] = NOBODY; chosen[each] = NOBODY; run Admitter(each) }
        each = 0;
        run Upkeep();
        run Server()
    }
}

#define waits(task) (status[task] == BLOCKED || status[task] == READY)
ltl begun { [] ((waits(1) && !is_new[1]) -> <> !waits(1)) }
