//! Space of network exports that dead processes had: their servers are told that it is not needed.
//!
//! Owns a thread, made when there is first something to trim, with connections of its own: no
//! other thread waits for a server. What a process frees while it lives it trims itself.
//!
//! Invariants
//! 1. An extent is trimmed only while it is kept from all processes, and only on the device that it
//!    lies on at that moment.
//! 2. It is in doubt from before the trim is sent until it is answered, as with a process's.
//! 3. A server that does not answer costs one wait, not one for each extent: what is left then is
//!    trimmed when it is written again, or never.
//!
//! Locks: none.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use swaptide_ipc::{AreaId, AreaState, EXTENT_BYTES, ExtentId, Segment};
use swaptide_store::nbd::{Certainty, Flags, Nbd, Options};

use crate::nbd::{Connector, LocalDialer};
use crate::swap::areas::Areas;
use crate::swap::spec::Medium;

/// The way to the thread.
#[derive(Default)]
pub(super) struct Trims(Mutex<Option<Sender<ExtentId>>>);

impl Areas {
    /// Has an extent of an export trimmed, some time.
    pub(super) fn trim_later(self: &Arc<Self>, extent: ExtentId) {
        let mut way = self.trims.0.lock().unwrap_or_else(PoisonError::into_inner);
        if way.as_ref().is_none_or(|way| way.send(extent).is_err()) {
            let (sender, extents) = channel();
            let areas = Arc::clone(self);
            let thread =
                std::thread::Builder::new().name("trim".into()).spawn(move || areas.trim(&extents));
            // Without a thread the space stays the server's to keep.
            *way = thread.ok().map(|_| sender);
            if let Some(way) = &*way {
                let _ = way.send(extent);
            }
        }
    }

    fn trim(&self, extents: &Receiver<ExtentId>) {
        let mut clients: HashMap<(AreaId, u32), Option<Nbd>> = HashMap::new();
        for extent in extents {
            let segment = self.segment();
            segment.while_trimmed(extent, || {
                let Some(place) = segment.place_of(extent) else { return };
                if segment.area(place.area).state() != AreaState::Open {
                    return;
                }
                clients.retain(|(area, generation), _| {
                    *area != place.area || *generation == place.generation
                });
                let client = clients
                    .entry((place.area, place.generation))
                    .or_insert_with(|| self.client(place.area));
                let Some(server) = client else { return };
                segment.doubt_extent(extent);
                let (told, certainty) = server.trim_surely(place.offset, EXTENT_BYTES);
                if certainty == Certainty::Answered {
                    segment.clear_doubt(extent);
                }
                if told.is_err() {
                    *client = None;
                }
            });
            if self.is_over(segment) {
                return;
            }
        }
    }

    /// A client for an area whose server knows how to trim.
    fn client(&self, id: AreaId) -> Option<Nbd> {
        let (url, export) = match &self.held().get(&id)?.backing.medium {
            Medium::Nbd(connector, export) if export.flags.contains(Flags::SEND_TRIM) => {
                (connector.url().clone(), *export)
            }
            _ => return None,
        };
        let dialer = LocalDialer::new(Connector::new(url).ok()?, export);
        Some(Nbd::new(export, Options::default(), Box::new(dialer), Vec::new()))
    }

    /// True if no area is left that could be trimmed.
    fn is_over(&self, segment: &Segment) -> bool {
        segment.areas().next().is_none()
    }
}
