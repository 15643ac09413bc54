//! Which pages of a chunk stay when the others go.
//!
//! User space sees no touch of a page that is there, but it sees how soon one comes back that went
//! out: the time until then is a sample of the time between two touches. A page that came back
//! *soon* (after few other pages went out) has that on its *record*, also while it is out. By its
//! record it stays for up to three *rounds*, that is, it is passed over so often when its chunk is
//! chosen; the other pages of the chunk go.
//!
//! That helps where some pages are touched more often than others. Where all are alike, who came
//! back soon did so by chance, and what stays only makes the moves shorter. So it is watched
//! whether pages with a record come back soon more often than those without one
//! ([`RecordWatch::pays`]).
//!
//! Owns: records and rounds of a chunk's pages; the watch.
//!
//! Locks: none; inside the engine's memory lock.

/// Rounds that a page stays at most.
pub(crate) const MAX_ROUNDS: u32 = 3;

/// Records and rounds of the pages of a chunk, a bit for each page in each mask.
#[derive(Clone, Copy, Default, Debug)]
pub struct ChunkHeat {
    /// It came back soon the last time it came back; if not, the time before, and more often.
    warm: u16,
    /// It came back soon at least twice in a row, not counting what came after.
    hot: u16,
    /// The number of rounds that it stays, in two bits.
    rounds: [u16; 2],
}

impl ChunkHeat {
    /// True if the page has a record.
    pub(crate) fn is_warm(&self, bit: u16) -> bool {
        self.warm & bit != 0
    }

    /// The page came back: soon or not. One with `pays` stays as its record says.
    pub(crate) fn came_back(&mut self, bit: u16, soon: bool, pays: bool) {
        if soon {
            self.hot |= self.warm & bit;
            self.warm |= bit;
        } else {
            self.warm &= !bit | self.hot;
            self.hot &= !bit;
        }
        self.end_rounds(bit);
        if pays {
            self.rounds[0] |= self.warm & bit;
            self.rounds[1] |= self.hot & bit;
        }
    }

    /// The page stays for one round.
    pub(crate) fn second_chance(&mut self, bit: u16) {
        self.rounds[0] |= bit;
    }

    /// Of these pages, those that stay this time: each has a round less.
    pub(crate) fn pass_over(&mut self, pages: u16) -> u16 {
        let [low, high] = self.rounds;
        let stay = pages & (low | high);
        self.rounds = [low ^ stay, high & !(stay & !low)];
        stay
    }

    /// The pages have no rounds left.
    pub(crate) fn end_rounds(&mut self, pages: u16) {
        self.rounds = self.rounds.map(|rounds| rounds & !pages);
    }

    /// The pages were given up: what comes there is something else.
    pub(crate) fn forget(&mut self, pages: u16) {
        self.warm &= !pages;
        self.hot &= !pages;
        self.end_rounds(pages);
    }
}

/// Pages with a record that must have come back before it counts.
const MIN_SEEN: u32 = 256;
/// From this number of pages that came back on, older ones count half.
const MAX_SEEN: u32 = 8192;
/// Records pay where pages with one come back soon this many halves times as often as the others.
const MIN_RATIO_HALVES: u64 = 3;
/// Less than one of this many is taken for as much.
const RARE: u64 = 64;

/// How many pages came back, and how many of them soon: without a record, and with one.
#[derive(Default, Debug)]
pub struct RecordWatch {
    back: [u32; 2],
    soon: [u32; 2],
}

impl RecordWatch {
    /// A page came back: with a record or without, soon or not.
    pub(crate) fn note(&mut self, is_warm: bool, soon: bool) {
        let at = usize::from(is_warm);
        self.back[at] += 1;
        self.soon[at] += u32::from(soon);
        if self.back[at] >= MAX_SEEN {
            self.back = self.back.map(|n| n / 2);
            self.soon = self.soon.map(|n| n / 2);
        }
    }

    /// True while pages with a record come back soon much more often than those without.
    pub(crate) fn pays(&self) -> bool {
        let [back, soon] = [self.back.map(u64::from), self.soon.map(u64::from)];
        let others = soon[0] + back[0] / RARE;
        self.back[1] >= MIN_SEEN && 2 * soon[1] * back[0] > MIN_RATIO_HALVES * others * back[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_stays_as_often_as_its_record_says() {
        let mut heat = ChunkHeat::default();
        let mut rounds_after = |soon: bool| {
            heat.came_back(1, soon, true);
            std::iter::from_fn(|| (heat.pass_over(1) != 0).then_some(())).count()
        };
        assert_eq!([true, true, true].map(&mut rounds_after), [1, 3, 3]);
        assert_eq!([false, false, false].map(&mut rounds_after), [1, 0, 0]);
        assert_eq!([true, false, true].map(&mut rounds_after), [1, 0, 1]);
    }

    #[test]
    fn no_page_stays_where_records_do_not_pay() {
        let mut heat = ChunkHeat::default();
        (0..3).for_each(|_| heat.came_back(4, true, false));
        assert!(heat.is_warm(4));
        assert_eq!(heat.pass_over(u16::MAX), 0);
        heat.second_chance(4);
        assert_eq!([heat.pass_over(6), heat.pass_over(6)], [4, 0]);
        heat.came_back(4, true, true);
        heat.forget(4);
        assert!(!heat.is_warm(4) && heat.pass_over(4) == 0);
    }

    #[test]
    fn records_pay_only_where_they_foretell() {
        let mut watch = RecordWatch::default();
        assert!(!watch.pays());
        let mut look = |warm_soon: u32, cold_soon: u32| {
            for k in 0..4 * MAX_SEEN {
                watch
                    .note(k % 2 == 0, k / 2 % 100 < if k % 2 == 0 { warm_soon } else { cold_soon });
            }
            watch.pays()
        };
        assert!(!look(25, 25), "by chance");
        assert!(look(60, 20));
        assert!(!look(30, 25), "no longer");
        assert!(look(10, 0));
        assert!(!look(0, 0));
    }

    proptest! {
        /// Masks against a number for each page.
        #[test]
        fn masks_are_numbers(steps in proptest::collection::vec((0..16usize, 0..6u8), 0..200)) {
            let mut heat = ChunkHeat::default();
            let mut model = [(0u8, 0u8); 16];
            for (k, step) in steps {
                let bit = 1u16 << k;
                let (record, rounds) = &mut model[k];
                match step {
                    0 | 1 => {
                        *record = if step == 0 { (*record * 2 + 1).min(3) } else { *record / 2 };
                        *rounds = *record;
                        heat.came_back(bit, step == 0, true);
                    }
                    2 => {
                        (*record, *rounds) = (0, 0);
                        heat.forget(bit);
                    }
                    3 => {
                        *rounds |= 1;
                        heat.second_chance(bit);
                    }
                    _ => {
                        let pages = if step == 4 { u16::MAX } else { bit };
                        let stay = heat.pass_over(pages);
                        for (k, (_, rounds)) in model.iter_mut().enumerate() {
                            let is_asked = pages >> k & 1 == 1;
                            prop_assert_eq!(stay >> k & 1 == 1, is_asked && *rounds > 0);
                            *rounds = rounds.saturating_sub(u8::from(is_asked));
                        }
                    }
                }
                prop_assert_eq!(heat.is_warm(bit), model[k].0 > 0);
            }
        }
    }
}
