//! Temporal prefetcher: replays the miss history when a fault sequence repeats.
//!
//! Streams ([`crate::readahead::locality`]) are known by their addresses. Much of what programs do
//! over and over has an order all the same: a walk along lists, trees or a hash table, a step of
//! training, the dump that a server's child writes. So the pages that faults without a stream ask
//! for are written down, in a *history*. Where two faults come one soon after the other as they did
//! before, a *repeated sequence* is found: the entries that follow are brought in before they are
//! asked for, at first one, then twice as many each time the next fault comes where they end.
//!
//! Owns: the history of this process, or, in a fork, the one that its parent's children write one
//! after another: a child that saves its parent's memory finds the sequence of the last one.
//!
//! Rules
//! 1. A repeated sequence is only a guess of what to bring in. A page in it that is not swapped is
//!    passed over.
//! 2. What a fault asks for, and what of the sequence it passed, is written down again: so the
//!    history holds the way as it was gone last, also where it changes a little. What was not
//!    brought and not asked for either is left out, and less is brought next time.
//! 3. The pages brought for a fault end with one that is not: the next fault comes there, or the
//!    program went another way. So a sequence that is left costs what was brought for one fault,
//!    and less each time; after [`MAX_MISSES`] faults elsewhere it is lost.
//! 4. A history that was of no use from end to end is given back, and started again after some
//!    time, which doubles.
//! 5. The history takes 12 bytes an entry, [`HISTORY_DIVISOR`] of the limit at most; what of a
//!    child's lies in shared memory is charged to its parent.
//!
//! Locks: none; that of [`crate::readahead::Readahead`] guards it. A child claims a history before
//! it writes, so two processes do not write the same one. If they did, readahead would bring the
//! wrong pages; no data would be lost.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};
use std::time::Duration;

use swaptide_sys::mem::{Mapping, SharedMap, memfd_create, prefetch};
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::process::pidfd_open;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::getpid;
use swaptide_sys::{AsFd, Errno};

use crate::mm::types::PageNo;

/// The part of the limit that a history may take.
const HISTORY_DIVISOR: u64 = 64;
const ENTRY_BYTES: u64 = 12;
/// Entries of the smallest and of the largest history.
const MIN_ENTRIES: u64 = 1 << 12;
const MAX_ENTRIES: u64 = 1 << 22;
/// Most pages that are brought ahead for a fault.
const MAX_DEPTH_PAGES: usize = 64;
/// The distance beyond the pages brought at which a fault still counts as in the sequence: what
/// lies between was there already.
const FOLLOW_SLACK_ENTRIES: u32 = 64;
/// The same for the second fault by which a repeated sequence is found.
const START_SLACK_ENTRIES: u32 = 8;
/// Faults elsewhere after which a sequence is given up.
const MAX_MISSES: u32 = 32;
/// At least one fault in this many must have been in a repeated sequence, or the history is of no
/// use.
const MIN_HIT_DIVISOR: u32 = 32;
/// At most this many lengths of a history pass until it is tried again.
const MAX_REST_LENGTHS: u32 = 64;

/// The header before the entries.
#[repr(C)]
struct HistoryHeader {
    /// The process that writes it; 0: none yet.
    writer: AtomicU32,
    /// Entries written so far, wrapping.
    written: AtomicU32,
}

/// The memory of a history.
enum HistoryMemory {
    Own(Mapping),
    Shared(SharedMap),
}

/// The last pages in the order in which they were asked for, and where each stands last.
struct MissHistory {
    memory: HistoryMemory,
    entries: u32,
}

impl MissHistory {
    fn bytes(entries: u32) -> usize {
        PAGE_SIZE + entries as usize * ENTRY_BYTES as usize
    }

    /// One that no child gets to see.
    fn own(entries: u32) -> Result<MissHistory, Errno> {
        Ok(MissHistory {
            memory: HistoryMemory::Own(Mapping::reserve(MissHistory::bytes(entries))?),
            entries,
        })
    }

    fn shared(entries: u32) -> Result<MissHistory, Errno> {
        let bytes = MissHistory::bytes(entries);
        let fd = memfd_create(c"swaptide-miss-history", bytes as u64)?;
        Ok(MissHistory {
            memory: HistoryMemory::Shared(SharedMap::map(fd.as_fd(), bytes)?),
            entries,
        })
    }

    fn start(&self) -> *mut u8 {
        match &self.memory {
            HistoryMemory::Own(mapping) => mapping.as_ptr(),
            HistoryMemory::Shared(map) => map.as_ptr(),
        }
    }

    fn head(&self) -> &HistoryHeader {
        // SAFETY: the first page of the memory is the head's; all zeros is one; it consists of
        // atomics, and lives as long as `self`.
        unsafe { &*self.start().cast::<HistoryHeader>() }
    }

    fn pages(&self) -> &[AtomicU64] {
        // SAFETY: `entries` words follow the first page, which are changed only as atomics, also by
        // other processes.
        unsafe {
            std::slice::from_raw_parts(self.start().add(PAGE_SIZE).cast(), self.entries as usize)
        }
    }

    /// By a page's hash: one more than where it stands.
    fn places(&self) -> &[AtomicU32] {
        // SAFETY: `entries` words follow those of `pages`, and are changed only as atomics.
        unsafe {
            std::slice::from_raw_parts(
                self.start().add(PAGE_SIZE + 8 * self.entries as usize).cast(),
                self.entries as usize,
            )
        }
    }

    fn place_of(&self, page: PageNo) -> &AtomicU32 {
        let hash = (page.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.places()[hash as usize & (self.entries as usize - 1)]
    }

    fn written(&self) -> u32 {
        self.head().written.load(Relaxed)
    }

    /// Returns the page at a place, if it was written and not overwritten since.
    fn page_at(&self, at: u32) -> Option<PageNo> {
        let age = self.written().wrapping_sub(at);
        if age == 0 || age > self.entries {
            return None;
        }
        Some(PageNo(self.entry(at).load(Relaxed) as usize))
    }

    fn entry(&self, at: u32) -> &AtomicU64 {
        &self.pages()[(at & (self.entries - 1)) as usize]
    }

    /// Returns the last place of a page.
    fn last(&self, page: PageNo) -> Option<u32> {
        let at = self.place_of(page).load(Relaxed).checked_sub(1)?;
        (self.page_at(at)? == page).then_some(at)
    }

    fn write(&self, page: PageNo) {
        let at = self.written();
        self.entry(at).store(page.0 as u64, Relaxed);
        // One in four thousand million is not found again.
        self.place_of(page).store(at.wrapping_add(1), Relaxed);
        self.head().written.store(at.wrapping_add(1), Relaxed);
    }

    /// Bytes of it that are in use.
    fn used_bytes(&self) -> u64 {
        match self.written() {
            0 => 0,
            written => {
                PAGE_SIZE as u64
                    + u64::from(written.min(self.entries)) * 8
                    + u64::from(self.entries) * 4
            }
        }
    }
}

/// A history that a process has for its children.
pub(crate) struct SharedMissHistory(MissHistory);

impl SharedMissHistory {
    /// An empty one, for processes with a limit of `limit` bytes.
    ///
    /// # Errors
    /// When there is no memory or no descriptor for it.
    pub(crate) fn new(limit: u64) -> Result<SharedMissHistory, Errno> {
        MissHistory::shared(entries_for(limit)).map(SharedMissHistory)
    }

    /// Bytes of it that are in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.0.used_bytes()
    }
}

/// True if a process has ended, or is a zombie.
fn has_ended(pid: u32) -> bool {
    match pidfd_open(pid) {
        Ok(pidfd) => {
            poll_readable(&[pidfd.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
        }
        Err(errno) => errno == Errno::SRCH,
    }
}

/// As many entries as a limit bears, a power of two.
fn entries_for(limit: u64) -> u32 {
    let entries = (limit / HISTORY_DIVISOR / ENTRY_BYTES).clamp(MIN_ENTRIES, MAX_ENTRIES);
    1 << entries.ilog2()
}

/// Replays a sequence of misses that repeats, and records the misses.
pub(crate) struct TemporalPrefetcher {
    history: Option<MissHistory>,
    /// The entry that is expected next, in a repeated sequence.
    next: Option<u32>,
    /// The end of the part of the sequence that was checked.
    shown: u32,
    /// The first entry that is not to be looked at for this fault, and the pages that may still be
    /// brought for it.
    bound: u32,
    left: usize,
    /// Pages that are brought for the next fault in the sequence.
    depth: usize,
    /// Faults elsewhere since the last one in the sequence.
    missed: u32,
    /// Behind where the last faults stood before: a sequence may begin there.
    begins: [Option<u32>; 2],
    /// Faults since it was last asked whether the history is of any use, and how many of them were
    /// in a repeated sequence.
    asked: u32,
    hits: u32,
    /// Pages that were read for this and brought in since the fault that was in the sequence last;
    /// and those before, which the program went over.
    replayed: u32,
    gone_over: usize,
    /// Faults that are still let pass, and how many histories' lengths that were at first.
    rests: u32,
    rested: u32,
    /// Raised with each fault.
    turn: u32,
}

impl TemporalPrefetcher {
    /// One that knows nothing.
    pub(crate) fn new() -> TemporalPrefetcher {
        TemporalPrefetcher {
            history: None,
            next: None,
            shown: 0,
            bound: 0,
            left: 0,
            depth: 0,
            missed: 0,
            begins: [None; 2],
            asked: 0,
            hits: 0,
            replayed: 0,
            gone_over: 0,
            rests: 0,
            rested: 0,
            turn: 0,
        }
    }

    /// In a fork: continues with the parent's history for its children, if no other child writes
    /// it.
    pub(crate) fn inherit(&mut self, history: SharedMissHistory) {
        let own = getpid().0;
        let writer = &history.0.head().writer;
        let before = writer.load(Relaxed);
        let is_free = before == 0 || before == own || has_ended(before);
        if is_free && writer.compare_exchange(before, own, AcqRel, Relaxed).is_ok() {
            self.history = Some(history.0);
        }
    }

    /// A fault asks for a page; a new history is made for `limit` bytes. What may be brought ahead,
    /// at most `most` pages (1 to [`MAX_DEPTH_PAGES`]), is told by [`TemporalPrefetcher::ahead`]
    /// then. `is_out` tells whether a page is swapped.
    pub(crate) fn learn(
        &mut self,
        page: PageNo,
        limit: u64,
        most: usize,
        is_out: impl Fn(PageNo) -> bool,
    ) {
        self.left = 0;
        self.turn = self.turn.wrapping_add(1);
        if self.rests > 0 {
            self.rests -= 1;
            return;
        }
        if self.history.is_none() {
            self.history = MissHistory::own(entries_for(limit)).ok();
        }
        let Some(history) = self.history.take() else {
            self.rests = u32::MAX;
            return;
        };
        self.find(&history, page, most, is_out);
        history.write(page);
        self.asked += 1;
        let is_due = self.asked >= history.entries;
        self.history = Some(history);
        if is_due {
            self.judge();
        }
    }

    /// Prefetches the place of a page that a fault will ask for soon.
    pub(crate) fn prefetch_index(&self, page: PageNo) {
        if let Some(history) = &self.history {
            prefetch(history.place_of(page));
        }
    }

    /// Prefetches the entry that the place names, a little later.
    pub(crate) fn prefetch_entry(&self, page: PageNo) {
        if let Some(history) = &self.history
            && let Some(at) = history.place_of(page).load(Relaxed).checked_sub(1)
        {
            prefetch(history.entry(at));
        }
    }

    /// Finds a page in the sequence, or a repeated sequence that continues from there.
    fn find(
        &mut self,
        history: &MissHistory,
        page: PageNo,
        most: usize,
        is_out: impl Fn(PageNo) -> bool,
    ) {
        let in_sequence = self.next.and_then(|next| {
            // First where it is expected; then in what was brought, and went out again.
            let at = find(history, page, self.shown, FOLLOW_SLACK_ENTRIES)
                .or_else(|| find(history, page, next, self.shown.wrapping_sub(next)));
            at.map(|at| (next, at))
        });
        if let Some((next, at)) = in_sequence {
            let brought = self.shown.wrapping_sub(next);
            let mut is_straight = at.wrapping_sub(next) >= brought;
            for k in 0..at.wrapping_sub(next) {
                let Some(passed) = history.page_at(next.wrapping_add(k)) else { break };
                if k >= brought && is_out(passed) {
                    // The program continued without it.
                    is_straight = false;
                } else {
                    history.write(passed);
                }
            }
            self.gone_over += self.replayed.min(at.wrapping_sub(next)) as usize;
            self.depth = if is_straight { self.depth * 2 } else { self.depth / 2 }
                .clamp(1, MAX_DEPTH_PAGES.min(most));
            self.follow(at.wrapping_add(1));
            return;
        }
        self.missed += 1;
        self.depth -= self.depth / 4;
        if self.missed > MAX_MISSES {
            self.next = None;
        }
        if self.next.is_some() {
            return;
        }
        if let Some(at) = self
            .begins
            .iter()
            .flatten()
            .find_map(|begin| find(history, page, *begin, START_SLACK_ENTRIES))
        {
            self.depth = 1;
            self.begins = [None; 2];
            self.follow(at.wrapping_add(1));
        } else if let Some(at) = history.last(page) {
            self.begins = [Some(at.wrapping_add(1)), self.begins[0]];
        }
    }

    /// The fault was in the sequence; `next` comes next.
    fn follow(&mut self, next: u32) {
        self.hits += 1;
        self.missed = 0;
        self.replayed = 0;
        self.next = Some(next);
        self.shown = next;
        self.left = self.depth;
        self.bound = next.wrapping_add(4 * self.depth as u32 + FOLLOW_SLACK_ENTRIES);
    }

    /// The next page in the sequence that may be brought in for the fault that was asked about
    /// last. That it was is told with [`TemporalPrefetcher::brought`].
    pub(crate) fn ahead(&mut self) -> Option<PageNo> {
        if self.left == 0 || self.shown == self.bound {
            return None;
        }
        let page = self.history.as_ref()?.page_at(self.shown)?;
        self.shown = self.shown.wrapping_add(1);
        Some(page)
    }

    /// The pages after the next one in the sequence, for prefetching: they may not come.
    pub(crate) fn coming(&self) -> [Option<PageNo>; 3] {
        let at = |k| self.history.as_ref()?.page_at(self.shown.wrapping_add(k));
        [at(1), at(2), at(3)]
    }

    /// A number of the fault that was asked about last.
    pub(crate) fn asked_of(&self) -> u32 {
        self.turn
    }

    /// The page that was told last was brought in; `is_read`: it was read for this.
    pub(crate) fn brought(&mut self, is_read: bool) {
        self.left = self.left.saturating_sub(1);
        self.replayed += u32::from(is_read);
    }

    /// Pages that were read for this and that the program went over, since the last call.
    pub(crate) fn take_replayed(&mut self) -> usize {
        std::mem::take(&mut self.gone_over)
    }

    /// After as many faults as the history has entries: was it of any use?
    #[cold]
    fn judge(&mut self) {
        let Some(history) = &self.history else { return };
        if self.hits >= self.asked / MIN_HIT_DIVISOR {
            self.rested = 0;
        } else {
            self.rested = (self.rested * 2).clamp(1, MAX_REST_LENGTHS);
            self.rests = history.entries.saturating_mul(self.rested);
            if let HistoryMemory::Own(mapping) = &history.memory {
                // All zeros is an empty history; if it stays as it is, no harm is done.
                let _ = mapping.discard(0, mapping.len());
            }
            self.next = None;
            self.begins = [None; 2];
        }
        (self.asked, self.hits) = (0, 0);
    }
}

/// Returns the place of a page among the `n` entries from `from` on.
fn find(history: &MissHistory, page: PageNo, from: u32, n: u32) -> Option<u32> {
    (0..n)
        .map(|k| from.wrapping_add(k))
        .take_while(|at| history.page_at(*at).is_some())
        .find(|at| history.page_at(*at) == Some(page))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashSet, VecDeque};

    /// Memory for some pages, the oldest of which goes first; and a prefetcher.
    struct Paged {
        prefetcher: TemporalPrefetcher,
        there: HashSet<usize>,
        order: VecDeque<usize>,
        room: usize,
        faults: usize,
        brought: usize,
    }

    impl Paged {
        fn new(room: usize) -> Paged {
            Paged {
                prefetcher: TemporalPrefetcher::new(),
                there: HashSet::new(),
                order: VecDeque::new(),
                room,
                faults: 0,
                brought: 0,
            }
        }

        fn bring(&mut self, page: usize) {
            assert!(self.there.insert(page));
            self.order.push_back(page);
            if self.order.len() > self.room {
                let out = self.order.pop_front().unwrap();
                self.there.remove(&out);
            }
        }

        fn touch(&mut self, page: usize) {
            if self.there.contains(&page) {
                return;
            }
            self.faults += 1;
            self.bring(page);
            self.prefetcher
                .learn(PageNo(page), 64 << 20, 64, |PageNo(page)| !self.there.contains(&page));
            while let Some(PageNo(page)) = self.prefetcher.ahead() {
                if !self.there.contains(&page) {
                    self.bring(page);
                    self.prefetcher.brought(true);
                    self.brought += 1;
                }
            }
        }

        /// Faults, and pages brought ahead, of a walk.
        fn walk(&mut self, way: impl Iterator<Item = usize>) -> (usize, usize) {
            (self.faults, self.brought) = (0, 0);
            way.for_each(|page| self.touch(page));
            (self.faults, self.brought)
        }
    }

    fn random(state: &mut u64) -> usize {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize
    }

    /// Each page so often, in no order.
    fn shuffled(pages: usize, often: usize) -> Vec<usize> {
        let mut way: Vec<usize> = (0..pages * often).map(|at| 7 * (at % pages)).collect();
        let mut state = 3;
        for at in (1..way.len()).rev() {
            way.swap(at, random(&mut state) % (at + 1));
        }
        way
    }

    #[test]
    fn a_repeated_sequence_is_prefetched() {
        let way = shuffled(4000, 1);
        let mut paged = Paged::new(1000);
        assert_eq!(paged.walk(way.iter().copied()), (4000, 0));
        let (faults, brought) = paged.walk(way.iter().copied());
        assert!(faults < 150 && faults + brought < 4100, "{faults} {brought}");
        let gone_over = paged.prefetcher.take_replayed();
        assert!(gone_over <= brought && gone_over > brought / 10 * 9, "{gone_over} {brought}");
        let (faults, _) = paged.walk(way.iter().copied());
        assert!(faults < 80, "{faults}");
    }

    #[test]
    fn a_sequence_that_crosses_itself_is_replayed_too() {
        let way = shuffled(4000, 3);
        let mut paged = Paged::new(1600);
        let (first, _) = paged.walk(way.iter().copied());
        let (second, _) = paged.walk(way.iter().copied());
        let (third, brought) = paged.walk(way.iter().copied());
        assert!(
            second < first / 3 && third < first / 8 && third + brought < first / 4 * 5,
            "{first} {second} {third} {brought}"
        );
    }

    #[test]
    fn a_changed_sequence_is_learned_again() {
        let mut way = shuffled(4000, 1);
        let mut paged = Paged::new(1000);
        paged.walk(way.iter().copied());
        for turn in 0..8 {
            // A twentieth of it is elsewhere.
            for at in (turn..way.len()).step_by(20) {
                way[at] = 100_000 + 4000 * turn + at;
            }
            let (faults, brought) = paged.walk(way.iter().copied());
            assert!(faults < 1200 && faults + brought < 5500, "{turn}: {faults} {brought}");
        }
        // What is no longer wanted goes little by little.
        let faults: Vec<usize> = (0..10).map(|_| paged.walk(way.iter().copied()).0).collect();
        assert!(faults[0] < 800 && faults[9] < faults[0] / 2, "{faults:?}");
    }

    #[test]
    fn random_faults_prefetch_nothing_and_release_the_history() {
        let mut paged = Paged::new(1000);
        let mut state = 11;
        let (faults, brought) = paged.walk((0..400_000).map(|_| random(&mut state) % 4000));
        assert!(faults > 250_000 && brought < faults / 100, "{faults} {brought}");
        assert!(
            paged.prefetcher.rests > 0
                && paged.prefetcher.history.as_ref().is_some_and(|history| history.written() == 0)
        );
        // And is begun again later.
        let way = shuffled(4000, 1);
        let mut least = usize::MAX;
        for _ in 0..200 {
            least = least.min(paged.walk(way.iter().copied()).0);
        }
        assert!(least < 200, "{least}");
    }

    #[test]
    fn a_child_goes_on_with_what_the_last_one_wrote() {
        let way = shuffled(3000, 1);
        let history = SharedMissHistory::new(64 << 20).unwrap();
        assert_eq!(history.used_bytes(), 0);
        let mut first = Paged::new(800);
        first.prefetcher.inherit(history);
        assert_eq!(first.walk(way.iter().copied()).0, 3000);
        let Some(history) = first.prefetcher.history.take() else { panic!("it was free") };
        let mut second = Paged::new(800);
        second.prefetcher.inherit(SharedMissHistory(history));
        assert!(second.walk(way.iter().copied()).0 < 150);
        let Some(history) = second.prefetcher.history.take() else { panic!("it was its own") };
        assert!(history.used_bytes() > 12 << 10);
        // Another process has it.
        history.head().writer.store(1, Relaxed);
        let mut third = TemporalPrefetcher::new();
        third.inherit(SharedMissHistory(history));
        assert!(third.history.is_none());
    }

    #[test]
    fn a_book_is_as_large_as_the_limit_bears() {
        for limit in [0, 16 << 20, 64 << 20, 256 << 20, 64 << 30, u64::MAX] {
            let entries = u64::from(entries_for(limit));
            assert!(
                entries.is_power_of_two()
                    && (entries * ENTRY_BYTES
                        <= (limit / HISTORY_DIVISOR).max(MIN_ENTRIES * ENTRY_BYTES))
            );
        }
        assert_eq!(entries_for(256 << 20), 1 << 18);
    }
}
