use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use swaptide_sys::Errno;

use super::*;
use crate::codec::{self, Choice, Compressor, PackedKind};

mod ahead;
mod failing;
mod forks;
mod full;
mod late;
mod later;
mod leaving;
mod mirror;
mod placing;
mod plain;
mod real;
mod remote;

/// The faults of a disk.
#[derive(Copy, Clone, Debug, PartialEq)]
enum Fault {
    /// Transfers move at most this many bytes.
    Short(usize),
    /// The nth operation from now fails.
    Fails(u32, Errno),
    /// Writes into extents below that number fail.
    Refuses(u32, Errno),
    /// The nth write from now reaches the disk only in its first half, and says nothing.
    Torn(u32),
    /// The nth read from now has a bit flipped.
    Flipped(u32),
}

#[derive(Default)]
struct DiskState {
    pages: BTreeMap<u64, Box<Page>>,
    /// Reads so far.
    reads: usize,
    fault: Option<Fault>,
    /// Extents that must be neither written nor punched.
    frozen: BTreeSet<u32>,
    /// Everything ever written, to find repetitions.
    ciphertexts: BTreeSet<[u8; 16]>,
}

/// A disk in memory that fails when told to.
#[derive(Clone, Default)]
struct Disk(Arc<Mutex<DiskState>>);

impl Disk {
    fn set_fault(&self, fault: Option<Fault>) {
        self.0.lock().unwrap().fault = fault;
    }
}

impl DiskState {
    /// True if the fault planned for the nth operation strikes now.
    fn strikes(&mut self, pick: impl Fn(&mut Fault) -> Option<&mut u32>) -> bool {
        let Some(left) = self.fault.as_mut().and_then(&pick) else { return false };
        if *left == 0 {
            return true;
        }
        *left -= 1;
        false
    }

    fn fails(&mut self) -> Option<Errno> {
        let Some(Fault::Fails(_, errno)) = self.fault else { return None };
        self.strikes(|fault| if let Fault::Fails(n, _) = fault { Some(n) } else { None })
            .then_some(errno)
    }

    fn most(&self) -> usize {
        if let Some(Fault::Short(n)) = self.fault { n } else { usize::MAX }
    }
}

impl BlockIo for Disk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        let mut disk = self.0.lock().unwrap();
        disk.reads += 1;
        if let Some(errno) = disk.fails() {
            return Err(errno);
        }
        let flip = disk.strikes(|fault| if let Fault::Flipped(n) = fault { Some(n) } else { None });
        if flip {
            disk.fault = None;
        }
        let most = buf.len().min(disk.most());
        let mut n = 0;
        while n < most {
            let at = offset as usize + n;
            let len = (most - n).min(PAGE_SIZE - at % PAGE_SIZE);
            match disk.pages.get(&((at / PAGE_SIZE) as u64)) {
                Some(page) => buf[n..n + len].copy_from_slice(&page[at % PAGE_SIZE..][..len]),
                None => buf[n..n + len].fill(0),
            }
            n += len;
        }
        if flip {
            buf[0] ^= 0x10;
        }
        Ok(n)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let mut disk = self.0.lock().unwrap();
        assert!(
            !disk.frozen.contains(&((offset / EXTENT_BYTES) as u32)),
            "a frozen extent is written to"
        );
        if let Some(errno) = disk.fails() {
            return Err(errno);
        }
        if let Some(Fault::Refuses(below, errno)) = disk.fault
            && offset < u64::from(below) * EXTENT_BYTES
        {
            return Err(errno);
        }
        let n = bytes.len().min(disk.most());
        let torn = disk.strikes(|fault| if let Fault::Torn(n) = fault { Some(n) } else { None });
        let reaches = if torn { n / 2 } else { n };
        if torn {
            disk.fault = None;
        }
        if offset.is_multiple_of(PAGE_SIZE as u64) && n == bytes.len() {
            // But for blocks that end, in zeros, with fewer bytes.
            for page in bytes.as_chunks::<PAGE_SIZE>().0.iter().filter(|page| page[8..16] != [0; 8])
            {
                assert!(
                    disk.ciphertexts.insert(page[..16].try_into().unwrap()),
                    "the same ciphertext twice"
                );
            }
        }
        let (mut at, mut rest) = (offset as usize, &bytes[..reaches]);
        while !rest.is_empty() {
            let len = rest.len().min(PAGE_SIZE - at % PAGE_SIZE);
            let page = disk
                .pages
                .entry((at / PAGE_SIZE) as u64)
                .or_insert_with(|| Box::new([0; PAGE_SIZE]));
            page[at % PAGE_SIZE..][..len].copy_from_slice(&rest[..len]);
            (at, rest) = (at + len, &rest[len..]);
        }
        Ok(n)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let mut disk = self.0.lock().unwrap();
        assert!(
            !disk.frozen.contains(&((offset / EXTENT_BYTES) as u32)),
            "a frozen extent is punched"
        );
        for page in offset / PAGE_SIZE as u64..(offset + len) / PAGE_SIZE as u64 {
            disk.pages.remove(&page);
        }
        Ok(())
    }
}

#[derive(Default)]
struct PoolState {
    free: Vec<u32>,
    next: u32,
    /// Leased by no process, as the segment does it.
    in_doubt: BTreeSet<u32>,
    /// The number of holders of each extent.
    holders: BTreeMap<u32, u32>,
    released: Vec<(Extent, bool)>,
}

/// Extents of a file that may grow to `most` of them.
#[derive(Clone)]
struct Source {
    state: Arc<Mutex<PoolState>>,
    most: u32,
    /// Extents with an odd number are not encrypted.
    plain: bool,
    /// All lie on a server alone.
    remote: bool,
    /// All lie on a server and have a mirror.
    mirrored: bool,
    /// All are given back by another thread than the one that frees their last page.
    later: bool,
    /// All lie on a rotational device.
    rotational: bool,
    /// Those from this one on lie on another device.
    second: Option<u32>,
    /// The process that gives back a shared extent last has it again, to punch it.
    retakes: bool,
    /// This process may write to none of them.
    barred: Arc<AtomicBool>,
}

impl Source {
    fn new(most: u32) -> Source {
        Source {
            state: Arc::default(),
            most,
            plain: false,
            remote: false,
            mirrored: false,
            later: false,
            rotational: false,
            second: None,
            retakes: false,
            barred: Arc::default(),
        }
    }

    /// As the source does when a child tells it what it inherited.
    fn share(&self, device: &FileDevice) {
        device
            .leased(|extent| *self.state.lock().unwrap().holders.get_mut(&extent.0).unwrap() += 1);
    }

    fn held(&self) -> usize {
        self.state.lock().unwrap().holders.len()
    }
}

impl ExtentSource for Source {
    fn lease(&self) -> Option<Extent> {
        if self.barred.load(Relaxed) {
            return None;
        }
        let mut state = self.state.lock().unwrap();
        let extent = match state.free.pop() {
            Some(extent) => extent,
            None if state.next < self.most => {
                state.next += 1;
                state.next - 1
            }
            None => return None,
        };
        assert!(state.holders.insert(extent, 1).is_none());
        Some(Extent(extent))
    }

    fn release(&self, extent: Extent, exclusive_hole_punch: bool) {
        let mut state = self.state.lock().unwrap();
        state.released.push((extent, exclusive_hole_punch));
        let holders =
            state.holders.get_mut(&extent.0).expect("an extent that no process holds is released");
        *holders -= 1;
        if *holders == 0 {
            state.holders.remove(&extent.0);
            if !state.in_doubt.contains(&extent.0) {
                state.free.push(extent.0);
            }
        }
    }

    fn is_in_doubt(&self, extent: Extent) -> bool {
        self.state.lock().unwrap().in_doubt.contains(&extent.0)
    }

    fn release_shared(&self, extent: Extent) -> bool {
        self.release(extent, false);
        let mut state = self.state.lock().unwrap();
        let again = self.retakes && !state.holders.contains_key(&extent.0);
        if again {
            state.free.retain(|free| *free != extent.0);
            state.holders.insert(extent.0, 1);
        }
        again
    }

    fn bar(&self, _extent: Extent) {
        self.barred.store(true, Relaxed);
    }

    fn back_off(&self, _extent: Extent) -> bool {
        let Some(first) = self.second else { return false };
        let mut state = self.state.lock().unwrap();
        state.next = state.next.max(first);
        state.free.retain(|extent| *extent >= first);
        true
    }

    fn is_plain(&self, extent: Extent) -> bool {
        self.plain && extent.0 % 2 == 1
    }

    fn is_rotational(&self, _extent: Extent) -> bool {
        self.rotational
    }

    fn is_on_server(&self, _extent: Extent) -> bool {
        self.remote || self.mirrored
    }

    fn defers_release(&self, _extent: Extent) -> bool {
        self.later
    }

    fn server_of(&self, _extent: Extent) -> Option<ServerId> {
        self.remote.then_some(ServerId(0))
    }
}

/// Pages of every kind: incompressible, text-like of many lengths, zero, same-filled.
fn page_of(seed: u32) -> Box<Page> {
    let mut page = Box::new([0; PAGE_SIZE]);
    let random = match seed % 8 {
        0 => return page,
        1 => {
            codec::fill(&mut page[..], u64::from(seed));
            return page;
        }
        2 => 16,
        3 | 4 => 300 + seed as usize % 1000,
        5 | 6 => 1000 + seed as usize % 2500,
        _ => PAGE_SIZE,
    };
    noise(&mut page[..random], seed);
    page[PAGE_SIZE - 4..].copy_from_slice(&seed.to_be_bytes());
    page
}

/// A page that does not compress.
fn raw_page(seed: u32) -> Box<Page> {
    let mut page = Box::new([0; PAGE_SIZE]);
    noise(&mut page[..], seed);
    page
}

fn noise(bytes: &mut [u8], seed: u32) {
    let mut state = u64::from(seed) << 20 | 1;
    for byte in bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (state >> 56) as u8;
    }
}

fn device(disk: &Disk, source: &Source) -> FileDevice {
    FileDevice::on(Box::new(disk.clone()), [7; 32], 1, Box::new(source.clone()))
}

/// The device as a forked child has it.
fn forked(parent: &FileDevice, disk: &Disk, source: &Source) -> FileDevice {
    let child = device(disk, source);
    {
        let parent = parent.store.state.lock();
        let mut state = child.store.state.lock();
        state.places = parent.places.clone();
        state.digests = parent.digests.clone();
        state.extents = parent.extents.clone();
    }
    child
}

/// Compressors for even and odd slots.
fn codecs() -> [Compressor; 2] {
    [Compressor::new(Choice::Lz4), Compressor::new(Choice::Zstd)]
}

fn write_pages(device: &FileDevice, pages: &[(u32, Box<Page>)]) -> Result<(), WriteError> {
    // Pages of both codecs, side by side.
    let mut codecs = codecs();
    let mut bytes = Vec::new();
    let kinds: Vec<_> = pages
        .iter()
        .map(|(slot, page)| {
            let start = bytes.len();
            let kind = match codecs[*slot as usize % 2].compress(page) {
                Packed::Zero => PackedKind::Zero,
                Packed::Same(word) => PackedKind::Same(word),
                Packed::Bytes(block) => {
                    bytes.extend_from_slice(block);
                    PackedKind::Bytes(block.len())
                }
                Packed::Raw(page) => {
                    bytes.extend_from_slice(page);
                    PackedKind::Raw
                }
            };
            (Slot(*slot), kind, start..bytes.len())
        })
        .collect();
    device.write(
        &kinds
            .iter()
            .map(|(slot, kind, at)| (*slot, kind.with(&bytes[at.clone()]).unwrap()))
            .collect::<Vec<_>>(),
    )
}

fn write(device: &FileDevice, pages: &[(u32, u32)]) -> Result<(), WriteError> {
    write_pages(
        device,
        &pages.iter().map(|&(slot, seed)| (slot, page_of(seed))).collect::<Vec<_>>(),
    )
}

/// Each page takes a block.
fn write_raw(device: &FileDevice, pages: &[(u32, u32)]) -> Result<(), WriteError> {
    let pages: Vec<_> = pages.iter().map(|&(slot, seed)| (Slot(slot), raw_page(seed))).collect();
    device.write(&pages.iter().map(|(slot, page)| (*slot, Packed::Raw(page))).collect::<Vec<_>>())
}

fn check(device: &FileDevice) {
    let state = device.store.state.lock();
    let mut spans = Vec::new();
    let mut cluster = 0;
    while state.places.of_cluster(cluster, |_, place| spans.push(place.span)) {
        cluster += 1;
    }
    state.extents.check(spans.into_iter());
}

fn read(device: &FileDevice, slots: &[u32]) -> Result<Vec<Box<Page>>, ReadError> {
    let mut pages: Vec<_> = slots.iter().map(|_| Box::new([0xee; PAGE_SIZE])).collect();
    device.read(
        &mut slots
            .iter()
            .zip(&mut pages)
            .map(|(&slot, page)| (Slot(slot), &mut **page))
            .collect::<Vec<_>>(),
    )?;
    Ok(pages)
}

#[derive(Clone, Debug)]
enum Op {
    Write(Vec<(u32, u32)>),
    Read(Vec<u32>),
    Free(Vec<u32>),
    Fault(Option<Fault>),
    Fork,
    /// Leave the extents whose lowest bits are as these, as far as one step goes.
    Leave(u32),
}

fn ops() -> impl Strategy<Value = Op> {
    let slot = 400u32..1400;
    let errno = prop_oneof![Just(Errno::IO), Just(Errno::NOSPC)];
    let fault = prop_oneof![
        3 => Just(None),
        1 => (100usize..9000).prop_map(|n| Some(Fault::Short(n))),
        1 => (0u32..4, errno).prop_map(|(n, errno)| Some(Fault::Fails(n, errno))),
        1 => (0u32..4).prop_map(|n| Some(Fault::Torn(n))),
        1 => (0u32..4).prop_map(|n| Some(Fault::Flipped(n))),
    ];
    // Batches of neighbours, as swap-out makes them, with single ones in between.
    let batch = (slot.clone(), 1u32..200)
        .prop_map(|(slot, n)| (slot..(slot + n).min(1400)).collect::<Vec<_>>());
    prop_oneof![
        4 => (batch.clone(), any::<u32>())
            .prop_map(|(slots, seed)| {
                Op::Write(slots.into_iter().map(|slot| (slot, seed ^ slot)).collect())
            }),
        3 => prop::collection::vec(slot.clone(), 1..20).prop_map(Op::Read),
        1 => batch.clone().prop_map(Op::Read),
        3 => batch.prop_map(Op::Free),
        2 => fault.prop_map(Op::Fault),
        1 => Just(Op::Fork),
        1 => (0u32..4).prop_map(Op::Leave),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

    /// Whatever the disk does: a page comes back as it was written or not at all, and a failed
    /// write changes nothing.
    #[test]
    fn never_a_wrong_page(ops in prop::collection::vec(ops(), 1..60), most in 1u32..7) {
        let disk = Disk::default();
        let source = Source::new(most);
        let device = device(&disk, &source);
        let mut model: HashMap<u32, u32> = HashMap::new();
        let mut history: HashMap<u32, Vec<u32>> = HashMap::new();
        let mut children = Vec::new();
        let mut torn_possible = false;
        for op in ops {
            match op {
                Op::Write(pages) => match write(&device, &pages) {
                    Ok(()) => {
                        for (slot, seed) in pages {
                            model.insert(slot, seed);
                            history.entry(slot).or_default().push(seed);
                        }
                    }
                    Err(error) => {
                        prop_assert!(pages.iter().any(|&(slot, _)| Slot(slot) == error.slot))
                    }
                },
                Op::Read(slots) => match read(&device, &slots) {
                    Ok(pages) => {
                        for (slot, mut page) in slots.iter().zip(pages) {
                            prop_assert!(*page == *page_of(model[slot]));
                            prop_assert!(device.unchanged(Slot(*slot), &page));
                            page[*slot as usize] ^= 1;
                            prop_assert!(!device.unchanged(Slot(*slot), &page));
                        }
                    }
                    Err(error) => {
                        prop_assert!(slots.contains(&error.slot.0));
                        match error.kind {
                            ReadErrorKind::NoSuchSlot => {
                                prop_assert!(!model.contains_key(&error.slot.0))
                            }
                            _ => prop_assert!(model.contains_key(&error.slot.0)),
                        }
                    }
                },
                Op::Free(slots) => {
                    for slot in slots {
                        prop_assert_eq!(device.free(Slot(slot)), model.remove(&slot).is_some());
                    }
                }
                Op::Fault(fault) => {
                    torn_possible |= matches!(fault, Some(Fault::Torn(_)));
                    disk.set_fault(fault);
                }
                Op::Fork if children.len() < 2 => {
                    device.freeze_all();
                    source.share(&device);
                    device.leased(|extent| {
                        disk.0.lock().unwrap().frozen.insert(extent.0);
                    });
                    let child = forked(&device, &disk, &source);
                    child.rekey_salt(100 + children.len() as u64);
                    children.push((child, model.clone()));
                }
                Op::Fork => {}
                Op::Leave(bits) => {
                    device.set_leaving(|extent| extent.0 % 3 == bits);
                    // Whatever it comes to: no page is lost.
                    device.leave();
                }
            }
            prop_assert_eq!(device.stats().pages, model.len());
            // Whatever was written, freed or moved since it was read: never an old page, never a
            // page of nothing.
            for (slot, seeds) in &history {
                let now = model.get(slot).map(|&seed| page_of(seed));
                for &seed in seeds.iter().rev().take(3) {
                    let page = page_of(seed);
                    prop_assert!(
                        now.as_ref() == Some(&page) || !device.unchanged(Slot(*slot), &page)
                    );
                }
            }
            check(&device);
        }
        disk.set_fault(None);
        children.push((device, model));
        for (device, model) in &children {
            for (&slot, &seed) in model {
                match read(device, &[slot]) {
                    Ok(pages) => prop_assert!(*pages[0] == *page_of(seed)),
                    Err(error) => {
                        prop_assert!(torn_possible, "{}", error);
                        prop_assert_eq!(error.kind, ReadErrorKind::Authentication);
                    }
                }
            }
        }
        for (device, _) in &children {
            device.clear();
            prop_assert_eq!(device.stats().extents, 0);
        }
        prop_assert_eq!(source.held(), 0);
    }
}

#[test]
fn an_empty_extent_is_punched_and_released() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    let pages: Vec<_> = (0..600).map(|slot| (slot, slot)).collect();
    write_raw(&device, &pages).unwrap();
    assert_eq!(source.held(), 2);
    (0..512).for_each(|slot| assert!(device.free(Slot(slot))));
    assert_eq!(source.state.lock().unwrap().released, [(Extent(0), true)]);
    assert_eq!(disk.0.lock().unwrap().pages.len(), 88, "blocks left on the disk");
    let FileStats { pages, extents, shared_extents, stored_bytes, block_bytes, .. } =
        device.stats();
    assert_eq!(
        (pages, extents, shared_extents, stored_bytes, block_bytes),
        (88, 1, 0, 88 * 4096, 88 * 4096)
    );
}

#[test]
fn a_page_that_was_read_is_known_again() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    write(&device, &[(1, 3), (2, 7), (3, 8)]).unwrap();
    assert!(!device.unchanged(Slot(1), &page_of(3)), "not read yet");
    let before = device.stats().metadata_bytes;
    read(&device, &[1, 2, 3]).unwrap();
    assert!(device.stats().metadata_bytes > before);
    for (slot, seed) in [(1, 3), (2, 7), (3, 8)] {
        assert!(device.unchanged(Slot(slot), &page_of(seed)));
        assert!(!device.unchanged(Slot(slot), &page_of(seed + 8)) || seed == 8);
    }
    // A forked child knows it too, under whatever key it writes.
    device.freeze_all();
    source.share(&device);
    let child = forked(&device, &disk, &source);
    child.rekey_salt(9);
    assert!(child.unchanged(Slot(1), &page_of(3)));
    write(&child, &[(1, 3)]).unwrap();
    assert!(!child.unchanged(Slot(1), &page_of(3)), "written, not read");
    assert!(device.free(Slot(2)) && device.free(Slot(1)) && device.free(Slot(3)));
    assert!(!device.unchanged(Slot(2), &page_of(7)), "freed");
}

/// A device whose file cannot grow and whose every block is in use, though of three pages only one
/// is left; and the slots left.
fn full_of_garbage(disk: &Disk, source: &Source) -> (FileDevice, Vec<(u32, u32)>) {
    let device = device(disk, source);
    // Pages of about a third of a block.
    let mut pages: Vec<_> = (0..).map(|slot| (slot, slot * 8 + 3)).take(2500).collect();
    let mut written = 0;
    for batch in pages.chunks(100) {
        if write(&device, batch).is_err() {
            break;
        }
        written += batch.len();
    }
    pages.truncate(written);
    let (left, gone): (Vec<_>, Vec<_>) = pages.into_iter().partition(|(slot, _)| slot % 5 == 0);
    gone.iter().for_each(|(slot, _)| assert!(device.free(Slot(*slot))));
    (device, left)
}

struct Stops<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}
