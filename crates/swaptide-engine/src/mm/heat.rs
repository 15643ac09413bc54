//! Which pages of a chunk stay when the others go.
//!
//! User space sees no touch of a page that is there, but it sees how soon one comes back that went
//! out: the time until then is a sample of the time between two touches. A page that a thread asked
//! for and that came back *soon* (after few other pages went out) has that on its *record*, also
//! while it is out. By its record it stays for up to seven *rounds*, that is, it is passed over so
//! often when its chunk is chosen; the other pages of the chunk go.
//!
//! Of a page that came unasked, readahead say, only one thing is known: if it came late, a touch
//! would have come later still.
//!
//! That helps where some pages are touched more often than others. Where all are alike, who came
//! back soon did so by chance, and what stays only makes the moves shorter. So it is watched
//! whether pages with a record come back soon more often than those without one
//! ([`RecordWatch::pays`]).
//!
//! Owns: records and rounds of a chunk's pages; the watch.
//!
//! Invariants
//! 1. A record is of a page's data: it is kept while the page is out, and goes when the page is
//!    given up.
//! 2. A page that is out has no rounds but for the moment in which it comes back. Both are kept by
//!    [`PageTable::set`](crate::mm::page_table::PageTable::set).
//! 3. Rounds keep no page from going where reclaim finds nothing else
//!    ([`crate::reclaim::swap_out`]).
//!
//! Locks: none; inside the engine's memory lock.

/// Records and rounds of the pages of a chunk: of numbers of 2 and 3 bits a mask for each bit, with
/// a bit for each page.
#[derive(Clone, Copy, Default, Debug)]
pub struct ChunkHeat {
    /// How often it came back soon, at most 3, less one for each time that it came late.
    record: [u16; 2],
    /// The number of rounds that it stays.
    rounds: [u16; 3],
}

impl ChunkHeat {
    /// True if the page has a record.
    pub(crate) fn has_record(&self, bit: u16) -> bool {
        (self.record[0] | self.record[1]) & bit != 0
    }

    /// The page came back soon.
    pub(crate) fn came_soon(&mut self, bit: u16) {
        let [low, high] = self.record;
        let raised = bit & !(low & high);
        self.record = [low ^ raised, high | raised & low];
    }

    /// The page came back late.
    fn came_late(&mut self, bit: u16) {
        let [low, high] = self.record;
        let lowered = bit & (low | high);
        self.record = [low ^ lowered, high & !(lowered & !low)];
    }

    /// The page stays for 1, 3 or 7 rounds, as its record says. True if it has one.
    pub(crate) fn stay_by_record(&mut self, bit: u16) -> bool {
        let [low, high] = self.record;
        self.end_rounds(bit);
        for (rounds, of_record) in self.rounds.iter_mut().zip([low | high, high, low & high]) {
            *rounds |= of_record & bit;
        }
        self.has_record(bit)
    }

    /// The page stays for one round at least.
    pub fn second_chance(&mut self, bit: u16) {
        self.rounds[0] |= bit;
    }

    /// Of these pages, those that stay this time: each has a round less.
    pub fn pass_over(&mut self, pages: u16) -> u16 {
        let [low, middle, high] = self.rounds;
        let stay = pages & (low | middle | high);
        let of_middle = stay & !low;
        self.rounds = [low ^ stay, middle ^ of_middle, high & !(of_middle & !middle)];
        stay
    }

    /// The pages have no rounds left.
    pub fn end_rounds(&mut self, pages: u16) {
        self.rounds = self.rounds.map(|rounds| rounds & !pages);
    }

    /// The page came back, soon or not: notes how long it is to stay. `is_asked`: a thread waits
    /// for it. True if it stays for its record's sake.
    pub fn came_back(
        &mut self,
        bit: u16,
        is_soon: bool,
        is_asked: bool,
        records: &mut RecordWatch,
    ) -> bool {
        if is_asked {
            records.note(self.has_record(bit), is_soon);
        }
        if !is_soon {
            self.came_late(bit);
        } else if is_asked {
            self.came_soon(bit);
        }
        self.end_rounds(bit);
        records.pays() && self.stay_by_record(bit)
    }

    /// The pages were given up: what comes there is something else.
    pub fn forget(&mut self, pages: u16) {
        self.record = self.record.map(|record| record & !pages);
        self.end_rounds(pages);
    }
}

/// Pages with a record, and pages without one, that must have come back before records count.
const MIN_SEEN: u32 = 256;
/// A page comes back soon if, since it went out, fewer others did than this part of those that are
/// there.
const SOON_DIVISOR: usize = 4;
/// From this number of pages of one kind that came back on, older ones of it count half.
const MAX_SEEN: u32 = 8192;
/// Records pay where pages with one come back soon this many halves times as often as the others.
const MIN_RATIO_HALVES: u64 = 3;
/// Less than one of this many is taken for as much.
const RARE: u64 = 64;

/// True if a page comes back soon that does after `distance` others went out, where `present` are
/// there.
pub fn is_soon(distance: u64, present: usize) -> bool {
    distance < (present / SOON_DIVISOR) as u64
}

/// How many pages came back, and how many of them soon: without a record, and with one.
#[derive(Default, Debug)]
pub struct RecordWatch {
    back: [u32; 2],
    soon: [u32; 2],
}

impl RecordWatch {
    /// A page came back that a thread asked for: with a record or without, soon or not.
    pub(crate) fn note(&mut self, has_record: bool, is_soon: bool) {
        let at = usize::from(has_record);
        self.back[at] += 1;
        self.soon[at] += u32::from(is_soon);
        if self.back[at] >= MAX_SEEN {
            (self.back[at], self.soon[at]) = (self.back[at] / 2, self.soon[at] / 2);
        }
    }

    /// True while pages with a record come back soon much more often than those without.
    fn pays(&self) -> bool {
        let [back, soon] = [self.back.map(u64::from), self.soon.map(u64::from)];
        let others = soon[0] + back[0] / RARE;
        self.back.iter().all(|n| *n >= MIN_SEEN)
            && 2 * soon[1] * back[0] > MIN_RATIO_HALVES * others * back[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_stays_as_often_as_its_record_says() {
        let mut heat = ChunkHeat::default();
        let mut rounds_after = |is_soon: bool| {
            if is_soon {
                heat.came_soon(1)
            } else {
                heat.came_late(1)
            }
            let stays = heat.stay_by_record(1);
            let rounds = std::iter::from_fn(|| (heat.pass_over(1) != 0).then_some(())).count();
            assert_eq!(stays, rounds > 0);
            rounds
        };
        assert_eq!([true, true, true, true].map(&mut rounds_after), [1, 3, 7, 7]);
        assert_eq!([false, false, false, false].map(&mut rounds_after), [3, 1, 0, 0]);
        assert_eq!([true, false, true].map(&mut rounds_after), [1, 0, 1]);
    }

    #[test]
    fn a_page_without_a_record_stays_for_a_second_chance_alone() {
        let mut heat = ChunkHeat::default();
        assert!(!heat.stay_by_record(4));
        assert_eq!(heat.pass_over(u16::MAX), 0);
        heat.second_chance(4);
        assert_eq!([heat.pass_over(6), heat.pass_over(6)], [4, 0]);
        heat.came_soon(4);
        heat.stay_by_record(4);
        heat.forget(4);
        assert!(!heat.has_record(4) && heat.pass_over(4) == 0);
    }

    #[test]
    fn records_pay_only_where_they_foretell() {
        let mut watch = RecordWatch::default();
        assert!(!watch.pays());
        // One page in `every` has a record.
        let mut look = |every: u32, recorded_soon: u32, others_soon: u32| {
            for k in 0..8 * every * MAX_SEEN {
                let has_record = k % every == 0;
                let soon = if has_record { recorded_soon } else { others_soon };
                watch.note(has_record, k / every % 100 < soon);
            }
            watch.pays()
        };
        assert!(!look(2, 25, 25), "by chance");
        assert!(look(2, 60, 20));
        assert!(!look(2, 30, 25), "no longer");
        assert!(look(100, 60, 20), "few have one, because they stay");
        assert!(!look(100, 25, 25));
        assert!(look(2, 10, 0));
        assert!(!look(2, 0, 0));
        let all_with_one = RecordWatch { back: [10, 8000], soon: [0, 1] };
        assert!(!all_with_one.pays());
    }

    proptest! {
        /// Masks against two numbers for each page.
        #[test]
        fn masks_are_numbers(steps in proptest::collection::vec((0..16usize, 0..7u8), 0..200)) {
            let mut heat = ChunkHeat::default();
            let mut model = [(0u8, 0u8); 16];
            for (k, step) in steps {
                let bit = 1u16 << k;
                let (record, rounds) = &mut model[k];
                match step {
                    0 => {
                        *record = (*record + 1).min(3);
                        heat.came_soon(bit);
                    }
                    1 => {
                        *record = record.saturating_sub(1);
                        heat.came_late(bit);
                    }
                    2 => {
                        (*record, *rounds) = (0, 0);
                        heat.forget(bit);
                    }
                    3 => {
                        *rounds |= 1;
                        heat.second_chance(bit);
                    }
                    4 => {
                        *rounds = (1 << *record) - 1;
                        heat.stay_by_record(bit);
                    }
                    _ => {
                        let pages = if step == 5 { u16::MAX } else { bit };
                        let stay = heat.pass_over(pages);
                        for (k, (_, rounds)) in model.iter_mut().enumerate() {
                            let is_asked = pages >> k & 1 == 1;
                            prop_assert_eq!(stay >> k & 1 == 1, is_asked && *rounds > 0);
                            *rounds = rounds.saturating_sub(u8::from(is_asked));
                        }
                    }
                }
                prop_assert_eq!(heat.has_record(bit), model[k].0 > 0);
            }
        }
    }
}
