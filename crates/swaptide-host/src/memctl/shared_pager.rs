//! The pager of the run's shared memory.
//!
//! Owns it: it is started when the first process asks for a region, and lives as long as this one.
//! To the controller it is a process of the run: it has a slot in the segment, with a limit, and
//! what it uses is this process's own memory and the regions' pages. The controller of a daemon
//! reads these from the slot, where the pager tells of them every few milliseconds.
//!
//! Locks: none of its own.

use std::sync::{Arc, OnceLock};

use swaptide_ipc::{AgentRequest, AreaId, Segment, SlotIndex};
use swaptide_shared::{PagerSettings, SharedMemoryPager};
use swaptide_sys::OwnedFd;
use swaptide_sys::sock::Conn;

use crate::client_conn::close;
use crate::swap::areas::AreaOpener;

/// The pager of the run's shared memory.
pub struct SharedPager {
    segment: &'static Segment,
    areas: Arc<dyn AreaOpener>,
    wanted: bool,
    /// The failure that a test injects into it.
    fail: u32,
    /// `None` inside: it could not be started.
    pager: OnceLock<Option<SharedMemoryPager>>,
}

impl SharedPager {
    /// A pager that is not started yet; never, if it is not wanted. It stays for the rest of the
    /// process's life, for the process ends when it is no longer needed.
    pub fn new(
        segment: &'static Segment,
        areas: Arc<dyn AreaOpener>,
        wanted: bool,
        fail: u32,
    ) -> &'static SharedPager {
        Box::leak(Box::new(SharedPager { segment, areas, wanted, fail, pager: OnceLock::new() }))
    }

    /// Answers a process's request that concerns shared memory. Without a pager it is hung up on,
    /// and continues without.
    pub fn serve(
        &self,
        request: AgentRequest,
        body: &[u8],
        fd: Option<OwnedFd>,
        conn: Conn,
        pid: u32,
    ) {
        let pager = match request {
            AgentRequest::Region if self.wanted => self.pager.get_or_init(|| self.start()).as_ref(),
            _ => self.pager.get().and_then(Option::as_ref),
        };
        match pager {
            Some(pager) => pager.serve(request, body, fd, conn, pid),
            None => close(conn),
        }
    }

    fn start(&self) -> Option<SharedMemoryPager> {
        let areas = self.areas.clone();
        let open = Arc::new(move |id: AreaId| areas.open(id));
        // This process has no standard error: what goes wrong shows in the counters.
        let log = |_: &str| {};
        let (segment, fail) = (self.segment, self.fail);
        SharedMemoryPager::start(PagerSettings { segment, open, log, fail, close }).ok()
    }

    /// Bytes of shared memory that count for a slot: all of them, if it is the pager's.
    pub fn resident_bytes(&self, index: SlotIndex) -> u64 {
        match self.pager.get() {
            Some(Some(pager)) if pager.index() == index => pager.resident_bytes(),
            _ => 0,
        }
    }
}
