//! Extents of an export that stay unused, because its server may still carry out a write or a trim
//! there that it never answered.
//!
//! Owns since when each has been so. A process's end, or a connection's, leaves them; nothing in
//! the protocol ever answers them. So they stay unused for the rest of the run, as long as they are
//! few: a run that continues for weeks, with a server that fails every day, must not lose its area.
//!
//! Locks: none; the caller's.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use swaptide_ipc::{AreaId, ExtentId, Segment};

/// What has been in doubt for so long may be used again, if a quarter of the area is in doubt. A
/// connection's own queue is given up by the kernel after about 20 minutes; what is later than this
/// was held by the server.
const STALE_DOUBT_AGE: Duration = Duration::from_secs(60 * 60);

/// The extents in doubt, with when each was first seen so.
#[derive(Default)]
pub(super) struct InDoubt(BTreeMap<ExtentId, Instant>);

impl InDoubt {
    /// Looks which extents are in doubt, and lets the oldest be used again where they are too many.
    pub(super) fn look(&mut self, segment: &Segment, id: AreaId, now: Instant) {
        let lost: Vec<ExtentId> = segment.extents_in_doubt(id).collect();
        if lost.is_empty() && self.0.is_empty() {
            return;
        }
        let before = std::mem::take(&mut self.0);
        self.0 = lost
            .into_iter()
            .map(|extent| (extent, before.get(&extent).copied().unwrap_or(now)))
            .collect();
        let area = segment.area(id);
        let most = area.extents() as usize / 4;
        let mut old: Vec<(Instant, ExtentId)> = self
            .0
            .iter()
            .map(|(extent, since)| (*since, *extent))
            .filter(|(since, _)| now.saturating_duration_since(*since) > STALE_DOUBT_AGE)
            .collect();
        old.sort_unstable();
        for (_, extent) in old.into_iter().take(self.0.len().saturating_sub(most)) {
            segment.clear_stale_doubt(extent);
            self.0.remove(&extent);
        }
        area.set_in_doubt(self.0.len() as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::segment;
    use swaptide_ipc::{AreaMask, NewArea};

    #[test]
    fn doubtful_extent_unused_until_old() {
        let segment = segment();
        let id = segment.add_area(NewArea::of_file(0, 8)).expect("an area");
        let index = segment.claim(7, 0).expect("slot");
        let lease = || segment.lease_extent(index, AreaMask::ALL);
        let held: Vec<ExtentId> = std::iter::from_fn(lease).take(3).collect();
        for extent in &held {
            assert!(segment.doubt_extent(*extent));
        }
        let (mut in_doubt, start) = (InDoubt::default(), Instant::now());
        in_doubt.look(segment, id, start);
        assert_eq!(segment.area(id).in_doubt(), 0, "they are held");
        // The process was killed.
        segment.release(index, |_| ());
        let index = segment.claim(8, 0).expect("slot");
        in_doubt.look(segment, id, start);
        assert_eq!((segment.area(id).in_doubt(), segment.area(id).free()), (3, 5));
        let lease = || segment.lease_extent(index, AreaMask::ALL);
        let others: Vec<ExtentId> = std::iter::from_fn(lease).collect();
        assert_eq!(others.len(), 5);
        assert!(others.iter().all(|extent| !held.contains(extent)));
        in_doubt.look(segment, id, start + STALE_DOUBT_AGE / 2);
        assert_eq!(lease(), None, "not old enough");
        in_doubt.look(segment, id, start + STALE_DOUBT_AGE + Duration::from_secs(1));
        assert_eq!(segment.area(id).in_doubt(), 2, "a quarter stays");
        assert!(lease().is_some_and(|extent| held.contains(&extent)));
        assert_eq!(lease(), None);
    }
}
