//! The designs that came before swaptide's core, and the experiments that set both side by side.
//!
//! Nothing but the command line imports this crate. A baseline that is slow for a wrong reason is a
//! lie, so where a baseline could be built in two ways, the faster one was taken: look-ups in the
//! trees take no lock, tree nodes come from a pool and not from the general allocator, every
//! baseline has the same spin lock as the core. Each has its own tests.
//!
//! | module    | what it owns |
//! |-----------|--------------|
//! | radix     | one radix tree: 64-way nodes, height grown lazily, one lock, look-ups without it |
//! | forest    | the swap cache made of such trees, in three shapes |
//! | map       | the static arrays: a byte of swap map and two of group for each slot |
//! | scanning  | the allocator that scans the map under the device's lock, free clusters only |
//! | clusters  | the allocator with cluster lists over the same static map |
//! | memory    | addresses for swap tables, and giving the memory of empty ones back to the system |
//! | layers    | a whole swap layer of each kind behind one interface |
//! | allocator, search_space, swap_table | the experiments |
//! | report    | rows, plots and the printed table |

#![deny(unsafe_code)]

pub mod allocator;
pub mod clusters;
pub mod forest;
pub mod layers;
pub mod map;
mod memory;
pub mod radix;
pub mod report;
pub mod scanning;
pub mod search_space;
pub mod swap_table;

/// xorshift64*: the experiments need spread and repeatability, not quality.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `below`, which is at least 1.
    pub fn below(&mut self, below: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32;
        ((u64::from(high) * u64::from(below)) >> 32) as u32
    }
}

/// Lets the spin locks (the core's own, the baselines have no other) give up the CPU after a while:
/// there may be more threads than CPUs.
pub fn use_yield() {
    static HOOK: fn() = std::thread::yield_now;
    swaptide_core::set_yield(&HOOK);
}

/// Seconds of CPU that this thread has used: what other programs take meanwhile does not show.
pub(crate) fn cpu_seconds() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// The median of `values`; 0 when there are none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(vec![]), 0.0);
    }

    #[test]
    fn random_numbers_spread() {
        let mut random = Random::new(1);
        let mut seen = [0u32; 16];
        (0..16_000).for_each(|_| seen[random.below(16) as usize] += 1);
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
    }
}
