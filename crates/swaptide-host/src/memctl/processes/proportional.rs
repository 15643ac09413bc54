//! What processes use that share pages since a fork.
//!
//! Owns the proportional sizes of members: each is read from the kernel (`smaps_rollup`), at a pace
//! that the cost of all allows, and carried on in between by the change of the resident size, and
//! by what was copied: a write to a shared page makes two of it, of which only the number of minor
//! faults tells. Other faults are minor as well, as those that map a page of a file or of shared
//! memory: as many in a second as the last reading has shown to have copied nothing are left out,
//! and those beyond them count. When a process comes or goes, those that share with it are
//! outdated, and are read again as soon as the pace allows.
//!
//! Invariants
//! 1. Readings of sizes that are known take a fifth of one processor at most, and a twentieth while
//!    no process comes or goes and none is older than [`MAX_PSS_AGE`].
//! 2. The oldest is read first, so no member keeps others from being read.
//! 3. Where a size cannot be read, all that a process has counts.
//!
//! Locks: none.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::process::{StatFd, pss_anon};
use swaptide_sys::thread::thread_cpu_time;

use super::{Member, ProcessTree, stack_start};

/// How old a size is at least before it is read again, while no process comes or goes.
const PSS_AGE: Duration = Duration::from_millis(10);
/// Of the CPU time that all such readings take, the time between two of one process is this many
/// times: once a process has come or gone with which it shares, and else. A reading walks the page
/// tables, of shared memory too.
const PSS_REST_CHANGED: u32 = 4;
const PSS_REST: u32 = 20;
/// CPU time of readings at a time, but for those of sizes that are not known. The rest after them
/// is as after a change.
const MAX_PSS_TIME: Duration = Duration::from_millis(5);
/// The most that an age comes to before it is read again, as far as that leaves time for others.
const MAX_PSS_AGE_CHANGED: Duration = Duration::from_millis(250);
const MAX_PSS_AGE: Duration = Duration::from_secs(2);
/// The time since a reading for which faults are left out: one that begins to copy is not taken for
/// one that only maps for longer.
const MAX_MAPPING_TIME: Duration = Duration::from_millis(500);

/// A member's proportional size, in bytes, and what it was read with.
pub(super) struct Pss {
    bytes: u64,
    /// The resident size when it was read.
    resident: u64,
    /// The minor faults by then, and bytes of those that copied nothing.
    faults: u64,
    discounted: u64,
    read: Instant,
    /// What all those that share copied since, as far as it is this one's loss, were every minor
    /// fault a copy.
    lost_at_most: u64,
    /// Bytes a second of the minor faults that copied nothing between the last two readings.
    mapped_per_s: u64,
    cost: Duration,
    /// A process that shares with it has come or gone since.
    is_outdated: bool,
}

impl ProcessTree {
    /// Counts what members use for which `shares` is true: they share pages. `changed`: the starts
    /// of the stacks of those with which a process shares that has come or gone.
    pub(super) fn count_proportionally(
        &mut self,
        changed: &HashSet<u64>,
        shares: impl Fn(&Member) -> bool + Copy,
    ) {
        let costs = self.members.values().filter(|member| shares(member));
        let cost = costs.filter_map(|member| Some(member.pss.as_ref()?.cost)).sum();
        let due = self.due_for_reading(changed, shares, cost);
        let mut taken = Duration::ZERO;
        for (pid, member) in &mut self.members {
            if member.guest {
                member.used = 0;
                member.pss = None;
            } else if shares(member) {
                if due.contains(pid) {
                    let is_known = member.pss.is_some();
                    let cost = member.read_proportional(*pid);
                    taken += if is_known { cost } else { Duration::ZERO };
                }
                member.count_proportionally(*pid);
            } else {
                member.pss = None;
            }
        }
        if !taken.is_zero() {
            self.read_from = Some(Instant::now() + taken * PSS_REST_CHANGED);
        }
        self.count_copies();
    }

    /// Members whose proportional sizes are to be read now: those that have none, and of the others
    /// that are old the oldest, as many as may be read at a time.
    fn due_for_reading(
        &mut self,
        changed: &HashSet<u64>,
        shares: impl Fn(&Member) -> bool,
        cost: Duration,
    ) -> HashSet<u32> {
        let may_read = self.read_from.is_none_or(|from| Instant::now() >= from);
        let (mut due, mut old) = (HashSet::new(), Vec::new());
        for (pid, member) in self.members.iter_mut().filter(|(_, m)| !m.guest && shares(m)) {
            let is_changed = changed.contains(&member.stack_start);
            match &mut member.pss {
                None => drop(due.insert(*pid)),
                Some(pss) => {
                    pss.is_outdated |= is_changed;
                    if may_read && pss.read.elapsed() >= pss_age(pss.is_outdated, cost) {
                        old.push((pss.read, *pid, pss.cost));
                    }
                }
            }
        }
        old.sort_unstable();
        let mut sum = Duration::ZERO;
        due.extend(old.into_iter().map_while(|(_, pid, cost)| {
            let is_one_of_few = sum < MAX_PSS_TIME;
            sum += cost;
            is_one_of_few.then_some(pid)
        }));
        due
    }

    /// Adds what was copied since the proportional sizes were read: a page of `n` that is copied
    /// for one of them is no longer shared by it, and by one less of the others.
    fn count_copies(&mut self) {
        let mut by_stack: HashMap<u64, (u64, u64, u64)> = HashMap::new();
        for member in self.members.values().filter(|member| member.pss.is_some()) {
            let (count, copied, most) = by_stack.entry(member.stack_start).or_default();
            *count += 1;
            *copied += member.copied();
            *most += member.copied_at_most();
        }
        for member in self.members.values_mut() {
            let (copied, copied_at_most) = (member.copied(), member.copied_at_most());
            let Some(pss) = &mut member.pss else { continue };
            let Some((count, all, most)) =
                by_stack.get(&member.stack_start).copied().filter(|(count, ..)| *count > 1)
            else {
                continue;
            };
            let lost = |own: u64, all: u64| {
                own / count * (count - 1) + (all - own) / (count * (count - 1))
            };
            pss.lost_at_most = lost(copied_at_most, most);
            member.used = (member.used + lost(copied, all)).min(member.resident);
        }
    }
}

impl Member {
    /// It has lost most of its memory since its size was read, as one does that executes a program.
    pub(super) fn has_lost_most(&self) -> bool {
        self.pss.as_ref().is_some_and(|pss| self.resident < pss.resident / 2)
    }

    /// Reads its proportional size; answers with the CPU time that it took. Where it cannot be
    /// read, all that it has counts until the next time.
    fn read_proportional(&mut self, pid: u32) -> Duration {
        // An exec in the meantime ends the sharing.
        self.stack_start = stack_start(pid);
        let began = thread_cpu_time();
        // Before: what is copied meanwhile may be counted twice until the next time, and not left
        // out.
        let faults = self.minor_faults(pid).unwrap_or_default();
        let bytes = pss_anon(pid).unwrap_or(self.resident);
        let cost = thread_cpu_time().since(began);
        let mapped_per_s = match &self.pss {
            Some(pss) if !pss.is_outdated => {
                let lost = (bytes + pss.resident).saturating_sub(pss.bytes + self.resident);
                let copied = share_of(self.copied_at_most(), lost, pss.lost_at_most);
                per_second(self.copied_at_most() - copied, pss.read.elapsed())
            }
            _ => 0,
        };
        self.pss = Some(Pss {
            lost_at_most: 0,
            mapped_per_s,
            bytes,
            resident: self.resident,
            faults,
            discounted: self.discounted,
            read: Instant::now(),
            cost,
            is_outdated: false,
        });
        cost
    }

    fn count_proportionally(&mut self, pid: u32) {
        self.faults = self.minor_faults(pid).unwrap_or(self.faults);
        if let Some(pss) = &self.pss {
            let carried = (pss.bytes + self.resident).saturating_sub(pss.resident);
            self.used = carried.min(self.resident);
        }
    }

    fn minor_faults(&mut self, pid: u32) -> Option<u64> {
        let stat = match &self.stat {
            Some(stat) => stat,
            None => self.stat.insert(StatFd::open(pid).ok()?),
        };
        stat.minor_faults()
    }

    /// Bytes of shared pages that it has written to since its proportional size was read, as far as
    /// its faults are not like those from before that.
    fn copied(&self) -> u64 {
        let Some(pss) = &self.pss else { return 0 };
        let mapped =
            pss.mapped_per_s as f64 * pss.read.elapsed().min(MAX_MAPPING_TIME).as_secs_f64();
        self.copied_at_most().saturating_sub(mapped as u64)
    }

    /// The same at most: what it grew by came by such faults, too.
    fn copied_at_most(&self) -> u64 {
        let Some(pss) = &self.pss else { return 0 };
        let came = self.faults.saturating_sub(pss.faults).saturating_mul(PAGE_SIZE as u64);
        let discounted = self.discounted.saturating_sub(pss.discounted)
            + self.resident.saturating_sub(pss.resident);
        came.saturating_sub(discounted)
    }
}

/// Of `all`, the share that `part` is of `whole`; all of it where that is not known.
fn share_of(all: u64, part: u64, whole: u64) -> u64 {
    if part >= whole {
        all
    } else {
        (u128::from(all) * u128::from(part) / u128::from(whole)) as u64
    }
}

fn per_second(bytes: u64, time: Duration) -> u64 {
    if time.is_zero() { 0 } else { (bytes as f64 / time.as_secs_f64()) as u64 }
}

/// How old a proportional size may be, if one reading each of all that share takes `cost`.
fn pss_age(is_outdated: bool, cost: Duration) -> Duration {
    match is_outdated {
        true => (cost * PSS_REST_CHANGED).min(MAX_PSS_AGE_CHANGED),
        false => (cost * PSS_REST).clamp(PSS_AGE, MAX_PSS_AGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_take_a_part_of_the_time_and_none_is_old_for_long() {
        let ms = Duration::from_millis;
        assert_eq!([0, 1, 100, 10_000].map(|cost| pss_age(false, ms(cost))), {
            [PSS_AGE, ms(20), MAX_PSS_AGE, MAX_PSS_AGE]
        });
        assert_eq!([0, 1, 100].map(|cost| pss_age(true, ms(cost))), {
            [ms(0), ms(4), MAX_PSS_AGE_CHANGED]
        });
    }

    #[test]
    fn faults_that_copied_nothing_are_left_out_for_a_while() {
        let (own, ms) = (std::process::id(), Duration::from_millis);
        let mut member = Member::open(own, own).expect("this process");
        member.read_proportional(own);
        let read_before = |member: &mut Member, age, mapped_per_s| {
            let pss = member.pss.as_mut().expect("it is read");
            (member.faults, member.discounted, member.resident) = (1000, 0, 100 << 20);
            (pss.faults, pss.discounted, pss.resident) = (0, 0, 100 << 20);
            (pss.read, pss.mapped_per_s) =
                (Instant::now().checked_sub(age).expect("time"), mapped_per_s);
        };
        read_before(&mut member, ms(100), 0);
        assert_eq!(member.copied(), 1000 * PAGE_SIZE as u64, "each may have copied");
        read_before(&mut member, ms(100), 20_000_000);
        let copied = member.copied();
        assert!((1_500_000..=2_096_000).contains(&copied), "{copied} of 4.1 MB, 2 MB were usual");
        read_before(&mut member, ms(60_000), 2_000_000);
        assert_eq!(member.copied(), 4_096_000 - 1_000_000, "half a second's, and no more");
        assert_eq!(member.copied_at_most(), 4_096_000);
        assert_eq!(
            [share_of(800, 1, 4), share_of(800, 5, 4), share_of(800, 0, 0)],
            [200, 800, 800]
        );
        assert_eq!([per_second(500, ms(250)), per_second(500, ms(0))], [2000, 0]);
    }

    #[test]
    fn a_size_stays_outdated_until_it_is_read() {
        let pid = std::process::id();
        let mut tree = ProcessTree::default();
        tree.members.insert(pid, Member::open(pid, pid).expect("this process"));
        let stack = HashSet::from([tree.members[&pid].stack_start]);
        let none = HashSet::new();
        let hour = Duration::from_secs(3600);
        assert!(tree.due_for_reading(&none, |_| true, hour).contains(&pid), "it is not known");
        let member = tree.members.get_mut(&pid).expect("it is there");
        member.read_proportional(pid);
        member.pss.as_mut().expect("it is read").read = Instant::now() + hour;
        assert!(tree.due_for_reading(&stack, |_| true, hour).is_empty(), "it is new");
        assert!(tree.due_for_reading(&none, |_| true, hour).is_empty());
        assert!(tree.members[&pid].pss.as_ref().expect("it is read").is_outdated);
        assert!(!tree.due_for_reading(&none, |_| true, Duration::ZERO).is_empty(), "but outdated");
        tree.members.get_mut(&pid).expect("it is there").read_proportional(pid);
        assert!(!tree.members[&pid].pss.as_ref().expect("it is read").is_outdated);
    }

    #[test]
    fn the_oldest_sizes_are_read_first_and_not_all_at_once() {
        let own = std::process::id();
        let mut tree = ProcessTree::default();
        let ms = Duration::from_millis;
        let now = Instant::now();
        for pid in 1..=9 {
            let mut member = Member::open(own, own).expect("this process");
            member.read_proportional(own);
            let pss = member.pss.as_mut().expect("it is read");
            (pss.read, pss.cost) = (now.checked_sub(ms(2000 - 100 * pid)).expect("time"), ms(2));
            tree.members.insert(pid as u32, member);
        }
        let due = tree.due_for_reading(&HashSet::new(), |_| true, ms(18));
        assert_eq!(due, HashSet::from([1, 2, 3]));
        tree.read_from = Some(Instant::now() + ms(3_600_000));
        assert!(tree.due_for_reading(&HashSet::new(), |_| true, ms(18)).is_empty());
    }
}
