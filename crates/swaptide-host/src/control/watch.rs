//! Everything that a run or a daemon shows at a moment, and what happened between two moments: for
//! `swaptide top`.
//!
//! Locks: none.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use crate::cgroup::tree::GroupView;
use crate::control::client;
use crate::control::server::{ControlError, TierRow};
use crate::report::totals::View;
use crate::swap::areas::AreaView;

/// A look at a run, or at a daemon and all that it keeps.
#[derive(Clone, Debug, Serialize)]
pub struct Scene {
    /// True if it is a daemon's.
    pub daemon: bool,
    /// The budget over everything.
    pub budget_bytes: u64,
    /// The bytes of it in use.
    pub resident_bytes: u64,
    /// The runs; one, if it is no daemon's.
    pub runs: Vec<View>,
    /// The swap areas with their numbers.
    pub areas: Vec<(u8, AreaView)>,
    /// The tiers, highest first.
    pub tiers: Vec<TierRow>,
    /// The groups of the run or daemon.
    pub groups: Vec<GroupView>,
    /// When the look was taken; rates are by the time between two.
    #[serde(skip)]
    pub at: Option<Instant>,
}

/// Rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Pages that came from compressed memory.
    pub zswpin: f64,
    /// Pages that came from swap areas.
    pub pswpin: f64,
    /// Pages that went to compressed memory.
    pub zswpout: f64,
    /// Pages that went to swap areas.
    pub pswpout: f64,
    /// Pages that came back soon after they went.
    pub refaults: f64,
    /// Faults that the handlers answered.
    pub faults: f64,
}

/// Looks at a run (the one that `pid` started or is in), or at the only one there is, or at the
/// daemon.
///
/// # Errors
/// See [`ControlError`].
pub fn look(pid: Option<u32>) -> Result<Scene, ControlError> {
    let daemon = pid.is_none() && client::daemon_is_there();
    // The run may be one that a daemon keeps: its groups and areas are the daemon's then.
    let groups = client::run_group(pid, "/", &[])?;
    let runs = if daemon { client::views()? } else { vec![client::stats(pid)?] };
    let of_root =
        |key: &str| groups.iter().find(|group| group.path == "/")?.values.get(key)?.parse().ok();
    let own = |f: fn(&View) -> u64| runs.iter().map(f).sum();
    let budget_bytes = if daemon { client::budget()? } else { own(|run| run.budget_bytes) };
    let resident_bytes =
        if daemon { of_root("ram.current").unwrap_or(0) } else { own(|run| run.resident_bytes) };
    Ok(Scene {
        daemon,
        budget_bytes,
        resident_bytes,
        areas: client::devices(pid)?,
        tiers: client::run_tiers(pid, None)?.tiers,
        groups,
        runs,
        at: Some(Instant::now()),
    })
}

impl Scene {
    /// Returns the rates since an earlier sample; runs that were not in it do not count.
    pub fn rates_since(&self, before: &Scene) -> Rates {
        let seconds = match (self.at, before.at) {
            (Some(now), Some(then)) => now.saturating_duration_since(then).as_secs_f64(),
            _ => 0.0,
        };
        if seconds <= 0.0 {
            return Rates::default();
        }
        let then: BTreeMap<u32, &View> = before.runs.iter().map(|run| (run.pid, run)).collect();
        let rate = |name: &str| {
            let of = |view: &View| view.stats.get(name).copied().unwrap_or(0);
            let grown = self
                .runs
                .iter()
                .filter_map(|run| Some(of(run).saturating_sub(of(then.get(&run.pid)?))));
            grown.sum::<u64>() as f64 / seconds
        };
        Rates {
            zswpin: rate("zswpin"),
            pswpin: rate("pswpin"),
            zswpout: rate("zswpout"),
            pswpout: rate("pswpout"),
            refaults: rate("workingset_refault_anon"),
            faults: rate("pgmajfault"),
        }
    }

    /// The name of the tier of a priority.
    pub fn tier_of(&self, priority: i32) -> &str {
        let tier = self.tiers.iter().find(|tier| (tier.start..=tier.end).contains(&priority));
        tier.map_or("-", |tier| &tier.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn scene(at: Instant, runs: &[(u32, u64)]) -> Scene {
        let run = |&(pid, pages): &(u32, u64)| View {
            pid,
            stats: BTreeMap::from([
                ("zswpin".to_owned(), pages),
                ("pgmajfault".to_owned(), pages / 2),
            ]),
            ..View::default()
        };
        let tier = |name: &str, start, end| TierRow { name: name.into(), index: 0, start, end };
        Scene {
            daemon: true,
            budget_bytes: 0,
            resident_bytes: 0,
            runs: runs.iter().map(run).collect(),
            areas: Vec::new(),
            tiers: vec![tier("SSD", 100, 32767), tier("NET", 5, 99)],
            groups: Vec::new(),
            at: Some(at),
        }
    }

    #[test]
    fn rates_need_earlier_run_and_no_reset() {
        let now = Instant::now();
        let before = scene(now, &[(1, 1000), (2, 500), (3, 9)]);
        let after = scene(now + Duration::from_secs(2), &[(1, 3000), (2, 100), (4, 7777)]);
        assert_eq!(
            after.rates_since(&before),
            Rates { zswpin: 1000.0, faults: 500.0, ..Rates::default() }
        );
        assert_eq!(before.rates_since(&before), Rates::default());
    }

    #[test]
    fn a_priority_has_the_tier_that_covers_it() {
        let scene = scene(Instant::now(), &[]);
        assert_eq!(
            [32767, 100, 99, 5, 4].map(|priority| scene.tier_of(priority)),
            ["SSD", "SSD", "NET", "NET", "-"]
        );
    }
}
