//! Reading ahead: what comes with a page, when, and that it is never an old page.

use super::*;
use crate::file::ahead::{Ahead, ReadAhead};

const N: u32 = 400;

/// A rotational device (or not), with `N` pages, written 40 at a time.
fn turning(rotational: bool) -> (Disk, FileDevice) {
    let disk = Disk::default();
    let device = device(&disk, &Source { rotational, ..Source::new(4) });
    for first in (0..N).step_by(40) {
        write_raw(&device, &(first..first + 40).map(|slot| (slot, slot + 1)).collect::<Vec<_>>())
            .unwrap();
    }
    disk.0.lock().unwrap().reads = 0;
    (disk, device)
}

fn bring(
    ahead: &mut ReadAhead,
    device: &FileDevice,
    slot: u32,
    most: usize,
) -> Result<(Box<Page>, Ahead), ReadError> {
    let mut page = Box::new([0xee; PAGE_SIZE]);
    let came = ahead.read(device, &mut [(Slot(slot), &mut *page)], most)?;
    Ok((page, came))
}

/// Reads slots one by one, and checks each. Gives the sum of what it took.
fn walk(
    ahead: &mut ReadAhead,
    device: &FileDevice,
    slots: impl IntoIterator<Item = u32>,
    most: usize,
) -> Ahead {
    let mut all = Ahead::default();
    for slot in slots {
        let (page, came) = bring(ahead, device, slot, most).unwrap();
        assert!(*page == *raw_page(slot + 1), "slot {slot}");
        all = Ahead { hits: all.hits + came.hits, ahead: all.ahead + came.ahead };
    }
    all
}

#[test]
fn pages_written_together_come_in_one_read() {
    for most in [8, 32, 512] {
        let (disk, device) = turning(true);
        // Every page of a block, not in the order of the slots.
        let order = (0..N).map(|at| at / 40 * 40 + at % 40 * 7 % 40);
        let came = walk(&mut ReadAhead::default(), &device, order, most);
        let reads = disk.0.lock().unwrap().reads;
        assert_eq!(came.hits + reads, N as usize, "most {most}: {came:?}");
        let fewest = N as usize / most.min(MAX_BLOCK_PAGES) / 2;
        assert!(
            (fewest..=N as usize * 5 / 8).contains(&reads),
            "most {most}: {reads} reads, {came:?}"
        );
    }
}

#[test]
fn random_walk_reads_little_ahead() {
    let (disk, device) = turning(true);
    let came =
        walk(&mut ReadAhead::default(), &device, (0..N).map(|at| at * 149 % N).step_by(9), 32);
    let reads = disk.0.lock().unwrap().reads;
    assert!(came.ahead < 32 && reads + came.hits == N as usize / 9 + 1, "{reads} reads, {came:?}");
    // On a device that does not turn, or where the caller says so, from the first page on.
    let (disk, solid) = turning(false);
    assert_eq!(walk(&mut ReadAhead::default(), &solid, 0..N, 32), Ahead::default());
    assert_eq!(disk.0.lock().unwrap().reads, N as usize);
    let (_, device) = turning(true);
    assert_eq!(walk(&mut ReadAhead::default(), &device, 0..N, 1), Ahead::default());
}

#[test]
fn a_window_grows_on_hits_and_shrinks_on_misses() {
    let (_, device) = turning(true);
    let mut ahead = ReadAhead::default();
    let mut sizes = Vec::new();
    for slot in 0..N {
        let (_, came) = bring(&mut ahead, &device, slot, 64).unwrap();
        if came.hits == 0 {
            sizes.push(came.ahead + 1);
        }
    }
    // Blocks are aligned, but end where the neighbours lie too far away.
    assert!(
        sizes[0] == 8
            && sizes[1..4].iter().all(|size| *size > 8)
            && sizes.iter().any(|size| *size > 40),
        "{sizes:?}"
    );
    let mut sizes = Vec::new();
    for slot in (0..N).step_by(80).chain((40..N).step_by(80)) {
        sizes.push(bring(&mut ahead, &device, slot, 64).unwrap().1.ahead + 1);
    }
    ahead.clear();
    assert!(sizes.windows(2).all(|w| w[1] <= w[0].max(2)) && sizes.ends_with(&[1, 1]), "{sizes:?}");
}

#[test]
fn freed_or_rewritten_page_not_handed_out() {
    let (disk, device) = turning(true);
    let mut ahead = ReadAhead::default();
    bring(&mut ahead, &device, 0, 8).unwrap();
    write_raw(&device, &[(1, 1001)]).unwrap();
    device.free(Slot(2));
    device.free(Slot(3));
    write_raw(&device, &[(3, 4)]).unwrap();
    let before = disk.0.lock().unwrap().reads;
    assert!(*bring(&mut ahead, &device, 1, 1).unwrap().0 == *raw_page(1001));
    assert_eq!(bring(&mut ahead, &device, 2, 1).unwrap_err().kind, ReadErrorKind::NoSuchSlot);
    assert!(*bring(&mut ahead, &device, 3, 1).unwrap().0 == *raw_page(4));
    assert_eq!(disk.0.lock().unwrap().reads, before + 2);
    // What stands as it was needs no disk, and is handed out once.
    assert_eq!(bring(&mut ahead, &device, 4, 1).unwrap().1, Ahead { hits: 1, ahead: 0 });
    assert_eq!(bring(&mut ahead, &device, 4, 1).unwrap().1, Ahead::default());
    assert_eq!(disk.0.lock().unwrap().reads, before + 3);
    // Nor is anything after `clear`.
    ahead.clear();
    assert_eq!(bring(&mut ahead, &device, 5, 1).unwrap().1, Ahead::default());
}

#[test]
fn an_unreadable_neighbour_costs_no_page() {
    let (disk, device) = turning(true);
    let block = |slot: u32| {
        u64::from(device.store.state.lock().places.get(Slot(slot)).unwrap().span.block())
    };
    let mut ahead = ReadAhead::default();
    disk.0.lock().unwrap().pages.get_mut(&block(5)).unwrap()[9] ^= 1;
    let (page, came) = bring(&mut ahead, &device, 6, 8).unwrap();
    assert!(*page == *raw_page(7));
    assert_eq!(came, Ahead::default());
    assert_eq!(bring(&mut ahead, &device, 5, 8).unwrap_err().kind, ReadErrorKind::Authentication);
    // The first read of both fails, the second is of the page alone.
    disk.set_fault(Some(Fault::Flipped(0)));
    assert!(*bring(&mut ahead, &device, 47, 8).unwrap().0 == *raw_page(48));
}

/// Where a block was to lie that could not be read whole, something else lay before.
#[test]
fn page_of_failed_read_not_handed_out() {
    let (disk, device) = turning(true);
    let mut ahead = ReadAhead::default();
    // Nine blocks of eight, of each the second half not asked for; the tenth has no room behind
    // them.
    for block in 0..9 {
        walk(&mut ahead, &device, block * 8..block * 8 + 4, 8);
    }
    let block = u64::from(device.store.state.lock().places.get(Slot(79)).unwrap().span.block());
    disk.0.lock().unwrap().pages.get_mut(&block).unwrap()[9] ^= 1;
    assert_eq!(walk(&mut ahead, &device, 72..73, 8), Ahead::default());
    let came = walk(&mut ahead, &device, (0..72).filter(|slot| slot % 8 >= 4), 1);
    assert_eq!(came.hits, 8 * 4, "but for the first block, all that was read is still there");
}

#[derive(Clone, Debug)]
enum Step {
    Write(u32, u32),
    Free(u32, u32),
    Read(Vec<u32>, usize),
    Fault(Option<Fault>),
    Leave(u32),
    Clear,
}

fn steps() -> impl Strategy<Value = Step> {
    let run = || (0u32..600, 1u32..60);
    prop_oneof![
        4 => run().prop_map(|(slot, n)| Step::Write(slot, n)),
        2 => run().prop_map(|(slot, n)| Step::Free(slot, n)),
        12 => (0u32..600, 1u32..7, 1usize..600)
            .prop_map(|(slot, n, most)| Step::Read((slot..slot + n).collect(), most)),
        12 => (0u32..600, 1usize..600).prop_map(|(slot, most)| Step::Read(vec![slot], most)),
        20 => (0u32..90, 8usize..40).prop_map(|(slot, most)| Step::Read(vec![slot], most)),
        1 => (0u32..4).prop_map(|n| Step::Fault(Some(Fault::Fails(n, Errno::IO)))),
        1 => (0u32..4).prop_map(|n| Step::Fault(Some(Fault::Flipped(n)))),
        2 => Just(Step::Fault(None)),
        1 => (0u32..3).prop_map(Step::Leave),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Whatever is written, freed, moved or broken between two reads: a page is what its slot
    /// holds, or an error.
    #[test]
    fn never_an_old_page(steps in prop::collection::vec(steps(), 1..150)) {
        let disk = Disk::default();
        let device = device(&disk, &Source { rotational: true, ..Source::new(4) });
        let mut ahead = ReadAhead::default();
        let mut model: HashMap<u32, u32> = HashMap::new();
        for (seed, step) in steps.into_iter().enumerate() {
            match step {
                Step::Write(first, n) => {
                    let pages: Vec<_> =
                        (first..first + n).map(|slot| (slot, seed as u32 * 1000 + slot)).collect();
                    if write(&device, &pages).is_ok() {
                        model.extend(pages);
                    }
                }
                Step::Free(first, n) => (first..first + n).for_each(|slot| {
                    device.free(Slot(slot));
                    model.remove(&slot);
                }),
                Step::Read(slots, most) => {
                    let mut pages: Vec<_> =
                        slots.iter().map(|_| Box::new([0xee; PAGE_SIZE])).collect();
                    let mut reqs: Vec<_> = slots
                        .iter()
                        .zip(&mut pages)
                        .map(|(slot, page)| (Slot(*slot), &mut **page))
                        .collect();
                    match ahead.read(&device, &mut reqs, most) {
                        Ok(_) => {
                            for (slot, page) in slots.iter().zip(&pages) {
                                prop_assert!(**page == *page_of(model[slot]), "slot {}", slot);
                            }
                        }
                        Err(error) if error.kind == ReadErrorKind::NoSuchSlot => {
                            prop_assert!(!model.contains_key(&error.slot.0))
                        }
                        Err(error) => prop_assert!(
                            slots.contains(&error.slot.0)
                                && (disk.0.lock().unwrap().fault.is_some()
                                    || error.kind == ReadErrorKind::Authentication),
                            "{}",
                            error
                        ),
                    }
                }
                Step::Fault(fault) => disk.set_fault(fault),
                Step::Leave(bits) => {
                    device.set_leaving(|extent| extent.0 % 3 == bits);
                    device.leave();
                }
                Step::Clear => ahead.clear(),
            }
            prop_assert_eq!(device.stats().pages, model.len());
        }
    }
}
