//! Filters of forks that pass from a supervisor which has let its processes go to the next one that
//! attaches to them: a process has one such filter, for good, and its forks fail without a reader.
//!
//! Owns: the connection between the thread that a client talks to and the one that has filters.
//! The socket has a name of its own then ([`KEPT_FILTERS`]): for other clients the run is over.
//!
//! Invariant: a filter has a reader at any time. Both supervisors read until the first one has
//! answered what it has read.
//!
//! Locks: none; threads talk through channels.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use swaptide_sys::Errno;
use swaptide_sys::eventfd::EventFd;

/// The time in which the thread that has the filters answers.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);
/// How the name of the socket ends.
pub(crate) const KEPT_FILTERS: &str = "forks";

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WantedFilters {
    /// A process that is under one of them.
    pub pid: u32,
    /// Which of them, from 0 on; `None`: they have been taken over.
    pub index: Option<usize>,
}

/// The answer to it; a filter comes along.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FilterList {
    /// How many there are.
    pub count: usize,
    /// The processes that are known to be under one, and when they began.
    pub processes: Vec<(u32, u64)>,
}

/// Filters, and the processes under them.
pub(crate) struct OfferedFilters {
    pub filters: Vec<OwnedFd>,
    pub processes: Vec<(u32, u64)>,
}

/// A request to the thread that has them.
pub(crate) enum FilterRequest {
    /// Those of a run with this process.
    Offer(u32, Sender<Option<OfferedFilters>>),
    /// They were taken over.
    Taken,
}

/// Reaches the thread that has the filters.
#[derive(Clone, Debug)]
pub struct FilterOffers {
    requests: Sender<FilterRequest>,
    wake: Arc<EventFd>,
}

impl FilterOffers {
    /// The two ends.
    ///
    /// # Errors
    /// Without a descriptor.
    pub(crate) fn new() -> Result<(FilterOffers, Receiver<FilterRequest>, Arc<EventFd>), Errno> {
        let wake = Arc::new(EventFd::new()?);
        let (requests, received) = channel();
        Ok((FilterOffers { requests, wake: Arc::clone(&wake) }, received, wake))
    }

    fn send(&self, request: FilterRequest) {
        let _ = self.requests.send(request);
        self.wake.signal();
    }

    /// Filter number `index` of those that a process may be under; `None` where there is none.
    pub(super) fn get(&self, pid: u32, index: usize) -> Option<(FilterList, OwnedFd)> {
        let (answer, offered) = channel();
        self.send(FilterRequest::Offer(pid, answer));
        let mut offered = offered.recv_timeout(OFFER_TIMEOUT).ok()??;
        let count = offered.filters.len();
        let filter = (index < count).then(|| offered.filters.swap_remove(index))?;
        Some((FilterList { count, processes: offered.processes }, filter))
    }

    /// They have been taken over.
    pub(super) fn release(&self) {
        self.send(FilterRequest::Taken);
    }
}
