//! Filters of forks that pass from a supervisor which has let its processes go to the next one that
//! attaches to them: a process has one such filter, for good, and its forks fail without a reader.
//!
//! Owns: the connection between the thread that a client talks to and the one that has filters.
//! The socket has a name of its own then ([`KEPT_FILTERS`]): for other clients the run is over.
//!
//! Invariants
//! 1. One supervisor reads a filter. While filters are lent, the one that has them reads none:
//!    forks wait. The next one reads them when this one has confirmed that they are its.
//! 2. They are lent for as long as the client's connection is open, [`LEASE_TIMEOUT`] at most.
//!
//! Locks: none; threads talk through channels.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use swaptide_sys::Errno;
use swaptide_sys::eventfd::EventFd;

/// How the name of the socket ends.
pub(crate) const KEPT_FILTERS: &str = "forks";
/// The time in which a supervisor that was given filters confirms that it reads them.
pub(super) const LEASE_TIMEOUT: Duration = Duration::from_secs(30);
/// What it says then, and what it is answered.
pub(super) const TAKEN: &[u8] = b"taken\n";
/// The time in which the thread that has the filters answers.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// A process that is under a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilteredProcess {
    pub pid: u32,
    /// When it began, in clock ticks since boot.
    pub began: u64,
    /// What it has started from then on is under the filter, too.
    pub since: u64,
}

/// The answer to a client; as many filters follow.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FilterList {
    /// How many there are.
    pub count: usize,
    /// The processes that are known to be under one.
    pub processes: Vec<FilteredProcess>,
}

/// Filters, and the processes under them.
pub(crate) struct OfferedFilters {
    pub filters: Vec<OwnedFd>,
    pub processes: Vec<FilteredProcess>,
}

/// What there is of filters that a process may be under.
pub(crate) enum FilterOffer {
    /// It is under none of these.
    None,
    /// They are in use: processes under them are managed, or another client has them.
    InUse,
    Lent(OfferedFilters),
}

/// A request to the thread that has them.
pub(crate) enum FilterRequest {
    /// Those of a run with this process.
    Lend(u32, Sender<FilterOffer>),
    /// They are the client's.
    Taken,
    /// The client has not taken them.
    Returned,
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

    /// Tells what has become of filters that were lent.
    pub(super) fn send(&self, request: FilterRequest) {
        let _ = self.requests.send(request);
        self.wake.signal();
    }

    /// The filters that a process may be under.
    pub(super) fn lend(&self, pid: u32) -> FilterOffer {
        let (answer, offered) = channel();
        self.send(FilterRequest::Lend(pid, answer));
        match offered.recv_timeout(OFFER_TIMEOUT) {
            Ok(offer) => offer,
            Err(_) => {
                // Should the answer come later, they are with no client.
                self.send(FilterRequest::Returned);
                FilterOffer::InUse
            }
        }
    }
}
