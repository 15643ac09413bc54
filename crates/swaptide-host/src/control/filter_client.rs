//! Takes over the filters of forks of a process from the supervisor that has let it go
//! ([`filter_offers`](super::filter_offers)).
//!
//! Locks: none.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::control::daemon_client::ask_at;
use crate::control::filter_offers::{KEPT_FILTERS, OfferedFilters, WantedFilters};
use crate::control::server::{Answer, Question, directory};

/// A supervisor that has filters to hand over.
pub(crate) struct FilterKeeper {
    socket: PathBuf,
    pid: u32,
}

impl FilterKeeper {
    fn ask(&self, index: Option<usize>) -> Option<(Answer, Option<OwnedFd>)> {
        let wanted = WantedFilters { pid: self.pid, index };
        ask_at(&self.socket, &Question::Filters(wanted)).ok()
    }

    /// They have a new reader.
    pub(crate) fn release(&self) {
        let _ = self.ask(None);
    }
}

/// The filters of a process that a supervisor of this user has let go.
pub(crate) fn take_over(pid: u32) -> Option<(FilterKeeper, OfferedFilters)> {
    let sockets = std::fs::read_dir(directory()).ok()?.flatten().map(|entry| entry.path());
    let is_keeper = |path: &PathBuf| path.extension().is_some_and(|end| end == KEPT_FILTERS);
    sockets.filter(is_keeper).find_map(|socket| {
        let keeper = FilterKeeper { socket, pid };
        let (mut filters, mut all) = (Vec::new(), 1);
        let mut processes = Vec::new();
        while filters.len() < all {
            let (Answer::Filters(list), Some(filter)) = keeper.ask(Some(filters.len()))? else {
                return None;
            };
            filters.push(filter);
            (all, processes) = (list.count, list.processes);
        }
        Some((keeper, OfferedFilters { filters, processes }))
    })
}
