//! The order of changes of mappings where they are read in another one than they happened in.
//!
//! The kernel reports a change after it has made it, and of two reports that wait it gives the
//! later one first. A thread that made one waits until it was read. So:
//!
//! Rules
//! 1. A move to where something is known is *late*: what was there left before, and the thread that
//!    tells of it is on its way.
//! 2. A program that waits at a fence after a move (rule 6 of [`crate::events::apply`]) goes on
//!    when that was applied. What gives something up at the new place until then is of what was
//!    there before. Reading goes on until nothing is late, or no change is on its way.
//! 3. Any other program may go on as soon as it was read that the old place was left, which the
//!    same thread says next. So it is looked first whether a thread is blocked in a call that takes
//!    away what is in the way ([`LateChanges::next_step`]), and one message is read at a time. What
//!    such a call may tell is of what was there before, at any time; so is all that is read of what
//!    is listed there before the old place was left. The rest comes behind the move.
//! 4. When no thread is in such a call, and none runs that could be on its way to it, nothing is in
//!    the way: what was armed there is what was moved there. Then the move is applied.
//! 5. What a late move takes away is where it was, for the table. What is read of that place comes
//!    behind the move.
//!
//! Owns: the changes that wait, and the calls that are to tell of what is in their way.
//! Locks: the memory lock.

use swaptide_sys::mapping_calls::MappingCall;
use swaptide_sys::page::VirtRange;
use swaptide_sys::uffd::Event;

use crate::mm::vma_change::{VmaChange, overlap};

/// A change that was read before one that happened earlier.
struct LateChange {
    event: Event,
    /// Its own number.
    number: u64,
}

/// Changes that wait for others.
#[derive(Default)]
pub struct LateChanges {
    /// In the order in which they have happened, as far as that is known.
    list: Vec<LateChange>,
    /// Changes that were taken so far.
    taken: u64,
    /// Calls that were seen to take away what is in the way of the first one, before the thread
    /// that moved could go on.
    in_the_way: Vec<MappingCall>,
}

/// What the changes are applied to.
pub(crate) trait KnownMappings {
    /// Something of a range is managed, armed or has contents.
    fn has(&self, range: VirtRange) -> bool;
    /// Something of a range is managed.
    fn is_listed(&self, range: VirtRange) -> bool;
    /// Something moved away from there, and no event has said yet that the old place was left.
    fn is_owed(&self, range: VirtRange) -> bool;
    /// The event says that such a place was left.
    fn fulfils(&self, event: &Event) -> bool;
    /// Threads that move something wait at a fence until that is applied.
    fn is_fenced(&self) -> bool;
    /// Applies a change that is the next.
    fn apply_now(&mut self, event: Event);
}

/// What is to be done about a late move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LateStep {
    /// Read: a thread tells of what was in the way.
    Read,
    /// Look again: a thread runs that may be on its way.
    Wait,
    /// Nothing was in the way.
    Apply,
}

fn source_of(event: &Event) -> Option<VirtRange> {
    VmaChange::of(event).and_then(VmaChange::source)
}

fn target_of(event: &Event) -> Option<VirtRange> {
    VmaChange::of(event).and_then(VmaChange::target)
}

fn is_move(event: &Event) -> bool {
    matches!(event, Event::Remap { .. })
}

/// True if it was read that the source of `late[at]` was left.
fn has_left(late: &[LateChange], at: usize) -> bool {
    let Some(source) = source_of(&late[at].event) else { return false };
    let is_of =
        |change: &&LateChange| matches!(change.event, Event::Unmap(range) if range == source);
    // Of several moves from one place each has its own.
    let is_earlier =
        |change: &&LateChange| is_move(&change.event) && source_of(&change.event) == Some(source);
    let earlier = late[..at].iter().filter(is_earlier).count();
    late.iter().filter(is_of).count() > earlier
}

/// True if the change may be what a thread in this call tells of.
fn tells(call: &MappingCall, change: &LateChange) -> bool {
    let is_of = source_of(&change.event)
        .is_some_and(|source| call.source.covers(&source) || call.target.covers(&source));
    let goes_there = target_of(&change.event)
        .is_none_or(|to| call.is_move && (call.target.is_empty() || call.target.covers(&to)));
    is_of && goes_there
}

impl LateChanges {
    /// None, with room for some: where they are taken in nothing may be allocated.
    pub(crate) fn with_capacity(n: usize) -> LateChanges {
        LateChanges {
            list: Vec::with_capacity(n),
            in_the_way: Vec::with_capacity(n),
            ..LateChanges::default()
        }
    }

    /// True if there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// What tells the first one from others; `None` if there is none.
    pub(crate) fn first(&self) -> Option<u64> {
        self.list.first().map(|late| late.number)
    }

    /// They, in the order in which they have happened, as far as that is known.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Event> {
        self.list.iter().map(|late| &late.event)
    }

    /// Applies a change, or keeps it until what happened before it was read.
    pub(crate) fn take(&mut self, to: &mut impl KnownMappings, event: Event) {
        self.taken += 1;
        let change = LateChange { event, number: self.taken };
        let at = self.place_of(to, &change);
        if self.must_wait(to, &change.event, at) {
            self.list.insert(at, change);
        } else {
            to.apply_now(change.event);
            self.go_on(to);
        }
    }

    /// Applies the first of them: nothing was in its way.
    pub(crate) fn apply_first(&mut self, to: &mut impl KnownMappings) {
        self.in_the_way.clear();
        if !self.list.is_empty() {
            let first = self.list.remove(0);
            to.apply_now(first.event);
            self.go_on(to);
        }
    }

    /// Applies all of them: no change is on its way.
    pub(crate) fn apply_all(&mut self, to: &mut impl KnownMappings) {
        while !self.is_empty() {
            self.apply_first(to);
        }
    }

    /// Applies what waits no longer.
    fn go_on(&mut self, to: &mut impl KnownMappings) {
        let mut at = 0;
        while at < self.list.len() {
            if self.must_wait(to, &self.list[at].event, at) {
                at += 1;
            } else {
                if at == 0 {
                    self.in_the_way.clear();
                }
                let late = self.list.remove(at);
                to.apply_now(late.event);
                at = 0;
            }
        }
    }

    /// The place of a change that was just read: before a move to where it gives something up, if
    /// that was there before (rules 2 and 3), else behind all.
    fn place_of(&self, to: &impl KnownMappings, change: &LateChange) -> usize {
        let Some(source) = source_of(&change.event) else { return self.list.len() };
        let gives_up_place = !matches!(change.event, Event::Remove(_));
        for (at, late) in self.list.iter().enumerate().filter(|(_, late)| is_move(&late.event)) {
            if gives_up_place && source_of(&late.event).is_some_and(|from| overlap(from, source)) {
                // Rule 5: what comes later in the list may bring something there.
                break;
            }
            if target_of(&late.event).is_some_and(|target| overlap(target, source)) {
                let was_seen = at == 0 && self.in_the_way.iter().any(|call| tells(call, change));
                let is_known = if to.is_fenced() {
                    to.has(source)
                } else {
                    to.is_listed(source) && !has_left(&self.list, at)
                };
                let is_before = was_seen || gives_up_place && is_known;
                return if is_before { at } else { self.list.len() };
            }
        }
        self.list.len()
    }

    /// True when a change must wait for one of the first `n` late ones, or for one that was not
    /// read yet.
    fn must_wait(&self, to: &impl KnownMappings, event: &Event, n: usize) -> bool {
        let brings = |range: VirtRange| {
            let mut targets = self.list[..n].iter().filter_map(|late| target_of(&late.event));
            targets.any(|target| overlap(target, range))
        };
        let takes_away = |range: VirtRange| {
            let moves = self.list[..n].iter().filter(|late| is_move(&late.event));
            moves.filter_map(|late| source_of(&late.event)).any(|source| overlap(source, range))
        };
        if let Some(target) = target_of(event)
            && (to.has(target) || to.is_owed(target) || brings(target))
        {
            return true;
        }
        if to.fulfils(event) {
            return false;
        }
        source_of(event).is_some_and(|source| {
            brings(source) || !matches!(event, Event::Remove(_)) && takes_away(source)
        })
    }

    /// What is to be done about the first late change, which is a move, by what the program's
    /// threads are in. `may_come`: one runs that may be on its way to a wait.
    pub(crate) fn next_step(
        &mut self,
        to: &impl KnownMappings,
        calls: &[MappingCall],
        may_come: bool,
    ) -> LateStep {
        let Some(first) = self.list.first() else { return LateStep::Apply };
        let (Some(source), Some(target)) = (source_of(&first.event), target_of(&first.event))
        else {
            return LateStep::Apply;
        };
        let is_mover = |call: &&MappingCall| call.is_move && call.source.covers(&source);
        let has_left = has_left(&self.list, 0);
        let has_mover = !has_left && calls.iter().any(|call| is_mover(&call));
        let mut in_the_way = calls
            .iter()
            .filter(|call| has_left || !is_mover(call))
            .filter(|call| overlap(call.source, target) || overlap(call.target, target))
            .peekable();
        let is_any = in_the_way.peek().is_some();
        if is_any && (has_left || has_mover || to.is_listed(target)) {
            if !has_left {
                self.in_the_way.clear();
                self.in_the_way.extend(in_the_way);
            }
            LateStep::Read
        } else if may_come {
            LateStep::Wait
        } else {
            LateStep::Apply
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use swaptide_sys::page::VirtAddr;

    const PLACES: usize = 6;
    const LEN: usize = 0x10000;

    fn place(at: usize) -> VirtRange {
        VirtRange::from_len(VirtAddr((at + 1) * 0x100000), LEN)
    }

    fn at_of(addr: VirtAddr) -> usize {
        addr.0 / 0x100000 - 1
    }

    /// What the table knows of a place.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Known {
        Nothing,
        Armed,
        /// This mapping, and how often its contents were dropped.
        Listed(u32, u32),
    }

    struct Table {
        known: [Known; PLACES],
        owed: Vec<usize>,
        is_fenced: bool,
    }

    impl Table {
        fn of(&self, range: VirtRange) -> Known {
            self.known[at_of(range.start)]
        }
    }

    impl KnownMappings for Table {
        fn has(&self, range: VirtRange) -> bool {
            self.of(range) != Known::Nothing
        }

        fn is_listed(&self, range: VirtRange) -> bool {
            matches!(self.of(range), Known::Listed(..))
        }

        fn is_owed(&self, range: VirtRange) -> bool {
            self.owed.contains(&at_of(range.start))
        }

        fn fulfils(&self, event: &Event) -> bool {
            matches!(event, Event::Unmap(range) if self.is_owed(*range))
        }

        fn is_fenced(&self) -> bool {
            self.is_fenced
        }

        fn apply_now(&mut self, event: Event) {
            match event {
                Event::Unmap(range) => {
                    let at = at_of(range.start);
                    // What was armed there meanwhile is something else.
                    if !self.owed.contains(&at) || self.known[at] != Known::Armed {
                        self.known[at] = Known::Nothing;
                    }
                    self.owed.retain(|owed| *owed != at);
                }
                Event::Remap { from, to, .. } => {
                    let (from, to) = (at_of(from), at_of(to));
                    self.owed.retain(|owed| *owed != to);
                    self.owed.push(from);
                    self.known[to] = match self.known[from] {
                        Known::Nothing => Known::Armed,
                        known => known,
                    };
                    self.known[from] = Known::Nothing;
                }
                Event::Remove(range) => {
                    if let Known::Listed(_, drops) = &mut self.known[at_of(range.start)] {
                        *drops += 1;
                    }
                }
                _ => unreachable!("the model has no other changes"),
            }
        }
    }

    /// A mapping of the kernel's.
    #[derive(Clone, Copy, Debug)]
    struct Block {
        id: u32,
        owner: usize,
        is_armed: bool,
        drops: u32,
    }

    /// A thread in a call: what it is yet to tell, and whether it waits for that to be read.
    struct Thread {
        tells: Vec<Event>,
        is_waiting: bool,
        call: Option<MappingCall>,
        /// A fence holds it after a move.
        is_held: bool,
    }

    struct Kernel {
        places: [Option<Block>; PLACES],
        threads: Vec<Thread>,
        /// Threads that wait for a read, the latest last.
        queue: Vec<usize>,
        next_id: u32,
    }

    impl Kernel {
        fn is_changing(&self) -> bool {
            self.threads.iter().any(|thread| !thread.tells.is_empty())
        }

        /// A thread changes a mapping; the kernel has done so when this returns.
        fn change(&mut self, of: usize, from: usize, to: usize, moves: bool) {
            let nothing = VirtRange { start: VirtAddr(0), end: VirtAddr(0) };
            let thread = &self.threads[of];
            if thread.call.is_some() || thread.is_held {
                return;
            }
            let own = |at: usize| self.places[at].is_some_and(|block| block.owner == of);
            let is_free = |at: usize| self.places[at].is_none();
            let mut tells = Vec::new();
            let mut leave = |places: &mut [Option<Block>; PLACES], at: usize| {
                let block = places[at].take();
                if block.is_some_and(|block| block.is_armed) {
                    tells.push(Event::Unmap(place(at)));
                }
                block
            };
            let call = if moves && own(from) && from != to && (own(to) || is_free(to)) {
                leave(&mut self.places, to);
                let block = self.places[from].take();
                self.places[to] = block;
                if block.is_some_and(|block| block.is_armed) {
                    let (from, to) = (place(from).start, place(to).start);
                    tells.push(Event::Remap { from, to, len: LEN });
                    tells.push(Event::Unmap(place(at_of(from))));
                    self.threads[of].is_held = true;
                }
                MappingCall { source: place(from), target: place(to), is_move: true }
            } else if !moves && own(from) {
                leave(&mut self.places, from);
                MappingCall { source: place(from), target: nothing, is_move: false }
            } else if !moves && is_free(from) {
                let id = self.next_id;
                self.next_id += 1;
                self.places[from] = Some(Block { id, owner: of, is_armed: false, drops: 0 });
                return;
            } else {
                return;
            };
            if !tells.is_empty() {
                self.threads[of].tells = tells;
                self.threads[of].call = Some(call);
            }
        }

        /// A thread drops the contents of a mapping.
        fn drop_contents(&mut self, of: usize, at: usize) {
            let thread = &mut self.threads[of];
            if let Some(block) = &mut self.places[at]
                && thread.call.is_none()
                && !thread.is_held
                && block.owner == of
                && block.is_armed
            {
                // The kernel drops them when that was read.
                block.drops += 1;
                thread.tells = vec![Event::Remove(place(at))];
                let nothing = VirtRange { start: VirtAddr(0), end: VirtAddr(0) };
                thread.call =
                    Some(MappingCall { source: nothing, target: nothing, is_move: false });
            }
        }

        /// A thread that has something to tell begins to wait.
        fn wait(&mut self, of: usize) {
            let thread = &mut self.threads[of];
            if !thread.tells.is_empty() && !thread.is_waiting {
                thread.is_waiting = true;
                self.queue.push(of);
            }
        }

        /// Reads a message: the latest first.
        fn read(&mut self) -> Option<Event> {
            let of = self.queue.pop()?;
            let thread = &mut self.threads[of];
            thread.is_waiting = false;
            let event = thread.tells.remove(0);
            if thread.tells.is_empty() {
                thread.call = None;
            }
            Some(event)
        }
    }

    /// What threads do, and the handler.
    type Script<'a> = std::iter::Peekable<std::slice::Iter<'a, Step>>;

    struct Model {
        kernel: Kernel,
        table: Table,
        late: LateChanges,
        /// What has been listed once.
        listed: Vec<u32>,
    }

    impl Model {
        /// Threads do what comes next, if that is theirs.
        fn disturb(&mut self, script: &mut Script<'_>) {
            let is_threads = |step: &&Step| !matches!(step, Step::Read | Step::Adopt(_));
            if let Some(step) = script.next_if(|step| is_threads(step)) {
                self.threads_step(*step);
            }
        }

        fn threads_step(&mut self, step: Step) {
            let threads = self.kernel.threads.len();
            match step {
                Step::Change { of, from, to, moves } => {
                    if !self.table.is_fenced {
                        self.kernel.threads[of % threads].is_held = false;
                    }
                    self.kernel.change(of % threads, from, to, moves);
                }
                Step::Drop { of, at } => self.kernel.drop_contents(of % threads, at),
                Step::Wait(of) => self.kernel.wait(of % threads),
                Step::Read | Step::Adopt(_) => unreachable!("that is the handler's"),
            }
        }

        /// Reads as the handler does, to the end of what is late.
        fn read(&mut self, script: &mut Script<'_>) {
            // A thread may go on while the next message is read.
            let most = if self.table.is_fenced { 16 } else { 1 };
            for _ in 0..most {
                let Some(event) = self.kernel.read() else { break };
                self.late.take(&mut self.table, event);
                self.disturb(script);
            }
            let mut turns = 0;
            while !self.late.is_empty() {
                turns += 1;
                assert!(turns < 1000, "it ends");
                if !self.kernel.is_changing() {
                    self.late.apply_all(&mut self.table);
                    break;
                }
                let step = if self.table.is_fenced { LateStep::Read } else { self.look() };
                self.disturb(script);
                match step {
                    LateStep::Apply => self.late.apply_first(&mut self.table),
                    LateStep::Wait => self.all_wait(),
                    LateStep::Read => match self.kernel.read() {
                        Some(event) => self.late.take(&mut self.table, event),
                        None => self.all_wait(),
                    },
                }
            }
            for thread in &mut self.kernel.threads {
                // Fences are answered.
                thread.is_held &= thread.call.is_some();
            }
        }

        fn look(&mut self) -> LateStep {
            let threads = &self.kernel.threads;
            let calls: Vec<MappingCall> =
                threads.iter().filter(|of| of.is_waiting).filter_map(|of| of.call).collect();
            let may_come =
                threads.iter().any(|thread| !thread.tells.is_empty() && !thread.is_waiting);
            self.late.next_step(&self.table, &calls, may_come)
        }

        fn all_wait(&mut self) {
            (0..self.kernel.threads.len()).for_each(|of| self.kernel.wait(of));
        }

        /// What is there is armed; it is listed if nothing is under way, after a read as before it.
        fn adopt(&mut self, at: usize, script: &mut Script<'_>) {
            for _ in 0..2 {
                if matches!(self.table.known[at], Known::Listed(..)) {
                    return;
                }
                let is_changing = self.kernel.is_changing();
                if let Some(block) = &mut self.kernel.places[at] {
                    block.is_armed = true;
                    self.table.known[at] = Known::Armed;
                    if !is_changing {
                        self.table.known[at] = Known::Listed(block.id, block.drops);
                        self.listed.push(block.id);
                    }
                }
                self.read(script);
            }
        }

        fn end(mut self) {
            for _ in 0..100 {
                self.all_wait();
                self.read(&mut [].iter().peekable());
            }
            assert!(!self.kernel.is_changing());
            for at in 0..PLACES {
                let block = self.kernel.places[at];
                if let Known::Listed(id, drops) = self.table.known[at] {
                    let is = block.map(|block| (block.id, block.drops));
                    assert_eq!(Some((id, drops)), is, "place {at}");
                } else if let Some(block) = block {
                    assert!(!self.listed.contains(&block.id), "{block:?} is lost");
                }
            }
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Change { of: usize, from: usize, to: usize, moves: bool },
        Drop { of: usize, at: usize },
        Wait(usize),
        Read,
        Adopt(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..3usize, 0..PLACES, 0..PLACES, prop::bool::weighted(0.7)).prop_map(
                |(of, from, to, moves)| Step::Change { of, from, to, moves }
            ),
            1 => (0..3usize, 0..PLACES).prop_map(|(of, at)| Step::Drop { of, at }),
            4 => (0..3usize).prop_map(Step::Wait),
            3 => Just(Step::Read),
            2 => (0..PLACES).prop_map(Step::Adopt),
        ];
        prop::collection::vec(step, 1..60)
    }

    /// `threads` of the program make changes; `is_fenced`: one that moves something waits until
    /// that was applied.
    fn run(steps: &[Step], threads: usize, is_fenced: bool) {
        let thread = || Thread { tells: Vec::new(), is_waiting: false, call: None, is_held: false };
        let mut model = Model {
            kernel: Kernel {
                places: [None; PLACES],
                threads: (0..threads).map(|_| thread()).collect(),
                queue: Vec::new(),
                next_id: 1,
            },
            table: Table { known: [Known::Nothing; PLACES], owed: Vec::new(), is_fenced },
            late: LateChanges::default(),
            listed: Vec::new(),
        };
        let mut script = steps.iter().peekable();
        while let Some(step) = script.next() {
            match *step {
                Step::Read => model.read(&mut script),
                Step::Adopt(at) => model.adopt(at, &mut script),
                step => model.threads_step(step),
            }
        }
        model.end();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn one_thread_past_libc(steps in steps()) {
            run(&steps, 1, false);
        }

        #[test]
        fn threads_past_libc(steps in steps()) {
            run(&steps, 3, false);
        }

        #[test]
        fn threads_that_wait_at_fences(steps in steps()) {
            run(&steps, 3, true);
        }
    }
}
