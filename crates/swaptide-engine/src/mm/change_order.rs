//! The order of changes of mappings where they are read in another one than they happened in.
//!
//! The kernel reports a change after it has made it, and of two reports that wait it gives the
//! later one first. A thread that made one waits until it was read. So:
//!
//! Rules
//! 1. A move to where something is known is *late*: what was there left before, and the thread that
//!    tells of it is on its way.
//! 2. The thread that moved a mapping says next that it has left the old place. Until that was
//!    read, with the move or in a later read, it makes no other change: what is read of the new
//!    place is of what was there before, and is applied at once.
//! 3. After that it may go on. What is then read of the new place comes behind the move: it is of
//!    the same thread, unless it is what another one was seen in before. In a program that waits at
//!    a fence after a move (rule 6 of [`crate::events::apply`]) it is of what was there before, if
//!    that is listed.
//! 4. What a late move takes away is where it was, for the table. What is read of that place comes
//!    behind the move.
//! 5. Before anything else is read it is looked whether a thread is blocked in a call that takes
//!    away what is in the way ([`LateChanges::next_step`]). When none is, and none runs that could
//!    be on its way to such a wait, nothing is in the way: what was armed there is what was moved
//!    there. Then the move is applied, in the order of reading.
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
    /// The number of the read that gave it.
    read: u32,
    /// Its own.
    number: u64,
}

/// Changes that wait for others.
#[derive(Default)]
pub struct LateChanges {
    /// In the order in which they were read.
    list: Vec<LateChange>,
    /// The number of the read under way.
    read: u32,
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
    /// Threads that move something wait until that is applied.
    fn is_fenced(&self) -> bool;
    /// Applies a change that is the next.
    fn apply_now(&mut self, event: Event);
}

/// What is to be done about a late move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LateStep {
    /// Read: a thread tells of what was in the way. `is_same`: the thread that moved still waits,
    /// so this counts as the same read.
    Read {
        /// No thread whose changes were read can have made another one since.
        is_same: bool,
    },
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

/// The number of the read in which it was said that the source of `late[at]` was left.
fn left_in(late: &[LateChange], at: usize) -> Option<u32> {
    let source = source_of(&late[at].event)?;
    let is_of =
        |change: &&LateChange| matches!(change.event, Event::Unmap(range) if range == source);
    // Of several moves from one place each has its own.
    let before =
        |change: &&LateChange| is_move(&change.event) && source_of(&change.event) == Some(source);
    let earlier = late[..at].iter().filter(before).count();
    late.iter().filter(is_of).nth(earlier).map(|change| change.read)
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

    /// They, in the order of reading.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Event> {
        self.list.iter().map(|late| &late.event)
    }

    /// What comes next was read after all that was read before.
    pub(crate) fn begin_read(&mut self) {
        self.read = self.read.wrapping_add(1);
    }

    /// Applies a change, or keeps it until what happened before it was read.
    pub(crate) fn take(&mut self, to: &mut impl KnownMappings, event: Event) {
        self.taken += 1;
        let change = LateChange { event, read: self.read, number: self.taken };
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
        if !self.list.is_empty() {
            self.in_the_way.clear();
            let first = self.list.remove(0);
            to.apply_now(first.event);
            self.go_on(to);
        }
    }

    /// Applies all of them: no change is on its way.
    pub(crate) fn apply_all(&mut self, to: &mut impl KnownMappings) {
        self.in_the_way.clear();
        for late in self.list.drain(..) {
            to.apply_now(late.event);
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
                // Rule 4: what comes later in the list may bring something there.
                break;
            }
            if target_of(&late.event).is_some_and(|target| overlap(target, source)) {
                let may_go_on = left_in(&self.list, at).is_some_and(|read| read != change.read);
                // Where the old place stays mapped its thread does not say so, and goes on.
                let was_seen = || at == 0 && self.in_the_way.iter().any(|call| tells(call, change));
                let is_before = match may_go_on {
                    true if was_seen() => true,
                    true => gives_up_place && to.is_fenced() && to.is_listed(source),
                    false => change.read == late.read || to.is_listed(source),
                };
                return if is_before { at } else { self.list.len() };
            }
        }
        self.list.len()
    }

    /// True when a change must wait for one of the first `n` late ones, or for one that was not
    /// read yet.
    fn must_wait(&self, to: &impl KnownMappings, event: &Event, n: usize) -> bool {
        let brings = |range: VirtRange| {
            let targets = self.list[..n].iter().filter_map(|late| target_of(&late.event));
            targets.into_iter().any(|target| overlap(target, range))
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
        let has_left = left_in(&self.list, 0).is_some();
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
            LateStep::Read { is_same: !has_left }
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

        /// Reads what waits: the latest first.
        fn read(&mut self) -> Vec<Event> {
            let mut events = Vec::new();
            while let Some(of) = self.queue.pop() {
                let thread = &mut self.threads[of];
                events.push(thread.tells.remove(0));
                thread.is_waiting = false;
                if thread.tells.is_empty() {
                    thread.call = None;
                }
            }
            events
        }
    }

    struct Model {
        kernel: Kernel,
        table: Table,
        late: LateChanges,
        /// What has been listed once.
        listed: Vec<u32>,
    }

    impl Model {
        /// Reads as the handler does, to the end of what is late.
        fn read(&mut self) {
            self.late.begin_read();
            for event in self.kernel.read() {
                self.late.take(&mut self.table, event);
            }
            let mut turns = 0;
            while !self.late.is_empty() {
                turns += 1;
                assert!(turns < 1000, "it ends");
                if !self.kernel.is_changing() {
                    self.late.apply_all(&mut self.table);
                    return;
                }
                let threads = &self.kernel.threads;
                let calls: Vec<MappingCall> =
                    threads.iter().filter(|of| of.is_waiting).filter_map(|of| of.call).collect();
                let may_come =
                    threads.iter().any(|thread| !thread.tells.is_empty() && !thread.is_waiting);
                match self.late.next_step(&self.table, &calls, may_come) {
                    LateStep::Apply => self.late.apply_first(&mut self.table),
                    LateStep::Wait => (0..threads.len()).for_each(|of| self.kernel.wait(of)),
                    LateStep::Read { is_same } => {
                        if !is_same {
                            self.late.begin_read();
                        }
                        for event in self.kernel.read() {
                            self.late.take(&mut self.table, event);
                        }
                    }
                }
            }
            for thread in &mut self.kernel.threads {
                // Fences are answered.
                thread.is_held &= thread.call.is_some();
            }
        }

        /// What is there is armed; it is listed if nothing is under way, after a read as before it.
        fn adopt(&mut self, at: usize) {
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
                self.read();
            }
        }

        fn end(mut self) {
            for _ in 0..100 {
                (0..self.kernel.threads.len()).for_each(|of| self.kernel.wait(of));
                self.read();
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
        for step in steps {
            match *step {
                Step::Change { of, from, to, moves } => {
                    if !is_fenced {
                        model.kernel.threads[of % threads].is_held = false;
                    }
                    model.kernel.change(of % threads, from, to, moves);
                }
                Step::Drop { of, at } => model.kernel.drop_contents(of % threads, at),
                Step::Wait(of) => model.kernel.wait(of % threads),
                Step::Read => model.read(),
                Step::Adopt(at) => model.adopt(at),
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
