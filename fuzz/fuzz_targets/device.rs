//! Bytes as a history of operations on a device and on a map. See README.md.
#![no_main]

#[path = "../../crates/swaptide-core/tests/history/mod.rs"]
mod history;

use history::{Op, Pair};
use libfuzzer_sys::fuzz_target;
use swaptide_core::Kind;
use swaptide_fuzz::Bytes;

/// Operations out of the fuzzer's bytes; none are left when it returns `None`.
struct History<'a>(Bytes<'a>);

impl History<'_> {
    fn byte(&mut self) -> Option<u8> {
        self.0.byte()
    }

    fn word(&mut self) -> Option<u32> {
        self.0.word()
    }

    /// How long a range is: mostly powers of two.
    fn n(&mut self) -> Option<u32> {
        let byte = u32::from(self.byte()?);
        Some(if byte < 160 { 1 << (byte % 10) } else { byte - 159 })
    }

    /// Which used slot.
    fn at(&mut self) -> Option<usize> {
        Some(usize::from(self.byte()?) << 8 | usize::from(self.byte()?))
    }

    fn op(&mut self) -> Option<Op> {
        let kind = self.byte()?;
        Some(match kind % 16 {
            0..=3 => {
                let (order, folio, who) = (self.byte()? % 10, self.byte()? % 6, self.byte()?);
                Op::Alloc {
                    cpu: u16::from(who % 3),
                    order,
                    folio: folio.into(),
                    group: u16::from(who / 3 % 3),
                }
            }
            4 => {
                let zero = u64::from(self.word()?);
                Op::ToShadow {
                    at: self.at()?,
                    n: self.n()?,
                    shadow: self.word()?,
                    zero: zero << 32 | zero,
                }
            }
            5 => Op::ToFolio { at: self.at()?, n: self.n()?, folio: u32::from(self.byte()? % 6) },
            6 => Op::Replace { at: self.at()?, n: self.n()?, to: u32::from(self.byte()? % 6) },
            7 => Op::Dup { at: self.at()?, n: self.n()?, times: if kind < 224 { 1 } else { 130 } },
            8 | 9 => {
                Op::Put { at: self.at()?, n: self.n()?, times: if kind < 224 { 1 } else { 130 } }
            }
            10 | 11 => Op::Free { at: self.at()?, n: self.n()?, expect: self.byte()? % 3 },
            12 => Op::Release { at: self.at()?, n: self.n()? },
            13 => Op::Zero { at: self.at()?, n: self.n()?, zero: kind < 128 },
            14 if kind < 128 => Op::Discard,
            14 => Op::Limit { limit: 1000 + self.word()? % 4000 },
            _ if kind < 80 => Op::Drain { keep: u32::from(self.byte()? % 4) },
            _ if kind < 160 => {
                let (max, refuse) = (1 + self.word()? % 2000, u32::from(self.byte()? % 40));
                Op::Compact {
                    max,
                    tear: max % 2 == 0,
                    refuse: if refuse < 30 { 0 } else { refuse },
                }
            }
            _ => Op::Swapoff { room: 1 + self.word()? % 5000 },
        })
    }
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = History(Bytes(data));
    let Some(kind) = bytes.byte() else { return };
    let slots = [4096, 4000, 1100, 1024][usize::from(kind % 4)];
    let medium = if kind & 8 == 0 { Kind::Solid } else { Kind::Rotational };
    let mut pair = Pair::new(slots, kind & 4 != 0, medium);
    let mut done = 0;
    while let Some(op) = bytes.op() {
        pair.apply(op);
        done += 1;
        if done % 16 == 0 {
            pair.check();
        }
    }
    pair.check();
});
