//! The file device and a plain map, on a file that others write to, cut and fill: a page that
//! comes back is the one that was stored, or none does.
#![no_main]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::{Bytes, page_of};
use swaptide_store::codec::{Choice, Compressor};
use swaptide_store::file::{EXTENT_BYTES, Extent, ExtentSource, FileDevice};
use swaptide_store::{PAGE_SIZE, Page, Slot};

/// Extents of a file that may grow to three.
#[derive(Clone)]
struct Source(Arc<Mutex<Vec<u32>>>, bool);

impl ExtentSource for Source {
    fn lease(&self) -> Option<Extent> {
        self.0.lock().expect("lock").pop().map(Extent)
    }

    fn release(&self, extent: Extent, _hole: bool) {
        let mut free = self.0.lock().expect("lock");
        assert!(!free.contains(&extent.0), "an extent is given back twice");
        free.push(extent.0);
    }

    fn is_plain(&self, _extent: Extent) -> bool {
        self.1
    }
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let Some(kind) = bytes.byte() else { return };
    let size = 3 * EXTENT_BYTES;
    let fd = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    let disk = File::from(fd.try_clone().expect("a descriptor"));
    disk.set_len(size).expect("long enough");
    let source =
        Source(Arc::new(Mutex::new((0..1 + u32::from(kind & 1) * 2).collect())), kind & 8 != 0);
    let device = FileDevice::new(fd, [kind; 32], 7, Box::new(source));
    let mut compressor = Compressor::new(Choice::ALL[usize::from(kind >> 1) % Choice::ALL.len()]);
    let mut model: BTreeMap<u32, Box<Page>> = BTreeMap::new();
    // The file was changed.
    let mut touched = false;
    for _ in 0..400 {
        let (Some(what), Some(arg)) = (bytes.byte(), bytes.byte()) else { break };
        let slot = u32::from(arg) * 3;
        match what % 8 {
            0..=2 => {
                // Some pages at once, some of them more than once.
                let n = 1 + u32::from(what >> 3);
                let seeds: Vec<(u32, Box<Page>)> = (0..n)
                    .map(|i| (slot + i, page_of(u32::from(arg) << 8 | u32::from(what) ^ i)))
                    .collect();
                for batch in seeds.chunks(8) {
                    // A compressor has one page's bytes at a time.
                    let packed: Vec<_> = batch
                        .iter()
                        .map(|(slot, page)| (*slot, owned(&mut compressor, page)))
                        .collect();
                    let pages: Vec<_> = packed
                        .iter()
                        .map(|(slot, (kind, bytes))| {
                            (Slot(*slot), kind.with(bytes).expect("its bytes"))
                        })
                        .collect();
                    if device.write(&pages).is_ok() {
                        model.extend(batch.iter().map(|(slot, page)| (*slot, page.clone())));
                    }
                }
            }
            3 | 4 => {
                let mut pages = vec![[0xEEu8; PAGE_SIZE]; 1 + usize::from(what >> 3) % 12];
                let mut wanted: Vec<(Slot, &mut Page)> =
                    pages.iter_mut().zip(slot..).map(|(page, slot)| (Slot(slot), page)).collect();
                match device.read(&mut wanted) {
                    Ok(()) => {
                        for (slot, page) in wanted {
                            assert!(
                                model.get(&slot.0).is_some_and(|stored| **stored == *page),
                                "{slot}: another page came back"
                            );
                            assert!(device.unchanged(slot, page), "{slot}: just read");
                        }
                    }
                    Err(error) => assert!(touched || !model.contains_key(&error.slot.0), "{error}"),
                }
            }
            5 => assert_eq!(device.free(Slot(slot)), model.remove(&slot).is_some(), "free"),
            6 => {
                touched = true;
                let at = (u64::from(arg) << 8 | u64::from(what)) * 64 % size;
                let mut byte = [0];
                let _ = disk.read_at(&mut byte, at);
                disk.write_all_at(&[byte[0] ^ (1 | what)], at).expect("write");
            }
            _ => {
                touched = true;
                match arg % 3 {
                    // Cut, and long again: what was there is zeros.
                    0 => {
                        disk.set_len(u64::from(arg) * 4096).expect("cut");
                        disk.set_len(size).expect("long again");
                    }
                    1 => disk.set_len(u64::from(arg) * 8192 % size).expect("cut"),
                    // One block in the place of another.
                    _ => {
                        let mut block = [0; PAGE_SIZE];
                        let _ = disk.read_at(&mut block, u64::from(what) * 4096);
                        disk.write_all_at(&block, u64::from(arg) * 4096).expect("write");
                    }
                }
            }
        }
        assert_eq!(device.contains(Slot(slot)), model.contains_key(&slot), "slot {slot}");
        assert_eq!(device.stats().pages, model.len());
    }
    device.clear();
    assert_eq!((device.stats().pages, device.stats().extents), (0, 0), "everything is given back");
});

fn owned(compressor: &mut Compressor, page: &Page) -> (swaptide_store::codec::PackedKind, Vec<u8>) {
    use swaptide_store::codec::{Packed, PackedKind};
    match compressor.compress(page) {
        Packed::Zero => (PackedKind::Zero, Vec::new()),
        Packed::Same(word) => (PackedKind::Same(word), Vec::new()),
        Packed::Bytes(bytes) => (PackedKind::Bytes(bytes.len()), bytes.to_vec()),
        Packed::Raw(page) => (PackedKind::Raw, page.to_vec()),
    }
}
