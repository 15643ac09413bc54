//! Reads that fail because this process, or the machine, is short of memory or descriptors.
//!
//! That says nothing of the page, which lies where it lay. So it is not given up: it is read again,
//! and where reads fail so for too long the process ends with a message. The handler does other
//! things between two attempts, for what ends the shortage may wait for it.
//!
//! Owns: how long reads have failed so in a row.
//!
//! Locks: none.

use std::time::Duration;

use swaptide_store::file::ReadError;
use swaptide_sys::thread::{Nanos, now, sleep};

use crate::sched::deadline::Deadline;

/// The time for which reads may fail so.
const SHORTAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// The same where a test wants to see what happens then.
const TEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Until when reads that fail for want of memory are tried again.
#[derive(Default)]
pub(crate) struct OwnShortage(Option<Deadline>);

impl OwnShortage {
    /// A read has not failed so.
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }

    /// An attempt that began at `began` has failed so. Returns after a moment if it is to be made
    /// again, and ends the process where that has been so for too long.
    pub(crate) fn pause(&mut self, error: &ReadError, began: Nanos, is_test: bool, log: fn(&str)) {
        let bound = if is_test { TEST_TIMEOUT } else { SHORTAGE_TIMEOUT };
        if self.0.is_none() {
            log(&format!("{error}: this process is short of memory or descriptors; trying again"));
        }
        let deadline = self.0.get_or_insert_with(|| Deadline::new(bound));
        // An attempt to connect to a server takes as long as it is worth.
        if deadline.is_over(|| false) || now().since(began) >= bound {
            crate::fatal(&format!(
                "{error}, for want of memory or descriptors, again and again (ulimit -n, ulimit -v)"
            ));
        }
        sleep(RETRY_INTERVAL);
    }
}
