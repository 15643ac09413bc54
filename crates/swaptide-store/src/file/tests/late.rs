//! A server that carries out writes and trims long after their client has given them up.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::nbd::tests::{Asked, Lab};
use crate::nbd::{Export, Flags};

const EXTENTS: u64 = 24;

/// The areas of a device that has only the server's.
struct OneServer {
    source: Source,
    lab: Lab,
}

impl AreaDirectory for OneServer {
    fn locate(&self, extent: Extent) -> Option<Location> {
        let offset = u64::from(extent.0) * EXTENT_BYTES;
        Some(Location { spot: FilePlace { area: 0, generation: 0, offset }, mirror: None })
    }

    fn open(&self, _area: u8) -> Result<Opened, Errno> {
        let export = Export {
            size: EXTENTS * EXTENT_BYTES,
            flags: Flags::HAS_FLAGS | Flags::SEND_TRIM | Flags::CAN_MULTI_CONN,
            structured: true,
            longest: 32 << 20,
            connections: 4,
        };
        Ok(Opened::Nbd { connection: None, export, dialer: Box::new(self.lab.clone()) })
    }

    fn failed(&self, _area: u8) {}

    fn doubt(&self, extent: Extent) -> bool {
        self.source.state.lock().unwrap().in_doubt.insert(extent.0)
    }

    fn clear_doubt(&self, extent: Extent) {
        self.source.state.lock().unwrap().in_doubt.remove(&extent.0);
    }
}

/// A device on a server that drops some requests and hangs up.
struct Late {
    device: FileDevice,
    source: Source,
    lab: Lab,
    /// The requests that it has dropped.
    dropped: Arc<Mutex<Vec<Asked>>>,
    /// Whether it drops the next change.
    drops: Arc<AtomicBool>,
}

fn late() -> Late {
    let (dropped, drops) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let lab = {
        let (dropped, drops) = (Arc::clone(&dropped), Arc::clone(&drops));
        Lab::of_size(EXTENTS * EXTENT_BYTES, move |peer| {
            while let Some(asked) = peer.ask() {
                if asked.changes() && drops.swap(false, Relaxed) {
                    dropped.lock().unwrap().push(asked);
                    return;
                }
                peer.answer(&asked);
            }
        })
    };
    let source = Source { remote: true, ..Source::new(EXTENTS as u32) };
    let areas = OneServer { source: source.clone(), lab: lab.clone() };
    let device = FileDevice::over(Box::new(areas), [7; 32], 1, Box::new(source.clone()));
    Late { device, source, lab, dropped, drops }
}

#[test]
fn a_late_write_hits_nothing_that_was_written_since() {
    let Late { device, source, lab, dropped, drops } = late();
    let mut seeds: BTreeMap<u32, u32> = BTreeMap::new();
    for round in 0..200u32 {
        // Some pages are freed, so that extents empty, and others written.
        let from = round * 331 % 3000;
        for slot in from..from + 400 {
            if seeds.remove(&slot).is_some() {
                assert!(device.free(Slot(slot)));
            }
        }
        drops.store(round % 23 == 11, Relaxed);
        device.trim_remote();
        drops.store(round % 17 == 3, Relaxed);
        let batch: Vec<_> = (from..from + 300).map(|slot| (slot, slot * 7 + round)).collect();
        write_raw(&device, &batch).unwrap();
        seeds.extend(batch);
        drops.store(false, Relaxed);
        check(&device);
        // Long after: all that has been dropped so far, again and again.
        if round % 5 == 0 {
            dropped.lock().unwrap().iter().for_each(|asked| lab.carry_out(asked));
            for (slot, seed) in &seeds {
                let page = &read(&device, &[*slot]).unwrap()[0];
                assert!(**page == *raw_page(*seed), "round {round}, slot {slot}");
            }
        }
    }
    assert!(dropped.lock().unwrap().len() >= 10, "requests were dropped");
    // Given back, they are leased by no process else either.
    device.clear();
    let doubtful = source.state.lock().unwrap().in_doubt.len();
    assert!(doubtful > 3, "{doubtful} extents");
    let left = std::iter::from_fn(|| source.lease()).count();
    assert_eq!(left + doubtful, EXTENTS as usize);
}

#[test]
fn answered_request_is_not_in_doubt() {
    let Late { device, source, .. } = late();
    for round in 0..20u32 {
        let batch: Vec<_> = (0..700).map(|slot| (slot, slot * 7 + round)).collect();
        write_raw(&device, &batch).unwrap();
        assert!(source.state.lock().unwrap().in_doubt.is_empty());
    }
    device.clear();
    assert!(source.state.lock().unwrap().in_doubt.is_empty());
    assert_eq!(source.held(), 0);
}
