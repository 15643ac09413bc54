//! Which pages a batch takes, and how they are put back.

use swaptide_engine::mm::heat::RecordWatch;

use super::*;

#[test]
fn a_batch_is_a_part_of_the_margin_and_smaller_after_each_that_failed() {
    const MIB: u64 = 1 << 20;
    let pages = |over: u64, limit, tries| batch_pages(over, limit, tries);
    assert_eq!(pages(0, 100 * MIB, 0), 0);
    assert_eq!([8, 32, 64, 4096].map(|mib| pages(1, mib * MIB, 0)), [32, 64, 128, 128]);
    assert_eq!([0, 1, u64::MAX].map(|limit| pages(1, limit, 0)), [16, 16, 128]);
    assert_eq!(pages(u64::MAX, 100 * MIB, 0), MAX_BATCH_PAGES);
    let after = |tries| pages(2 * MIB, 100 * MIB, tries);
    assert_eq!([0, 1, 4, 5, 6, u32::MAX].map(after), [512, 256, 32, 16, 16, 16]);
}

fn region() -> Region {
    let memory = swaptide_sys::mem::memfd_create(c"test", 64 << 12).expect("memfd");
    let memory = std::fs::File::from(memory);
    let mut region = Region::new(RegionId::of(&memory).expect("stat"), Arc::new(memory), 64, 0);
    (0..64).for_each(|page| region.set(page, RegionPage::Present));
    region
}

#[test]
fn what_was_written_on_its_way_out_stays_once_more() {
    let mut region = region();
    let take = |region: &mut Region, pass_over| {
        let mut runs = Vec::new();
        let count = take_chunk(region, 1, pass_over, &mut runs);
        let pages: Vec<usize> = runs.into_iter().flat_map(|(_, run)| run).collect();
        assert_eq!(count, pages.len());
        pages
    };
    region.keep(19);
    region.keep(20);
    assert_eq!(take(&mut region, ChunkHeat::pass_over), (16..19).chain(21..32).collect::<Vec<_>>());
    assert_eq!(take(&mut region, ChunkHeat::pass_over), [19, 20], "its round is over");
    assert_eq!(take(&mut region, ChunkHeat::pass_over), []);
    region.keep(30);
    assert_eq!(take(&mut region, none_stays), [30], "where nothing else is found");
}

#[test]
fn pages_that_came_back_soon_stay_longer() {
    let mut region = region();
    let mut records = RecordWatch::default();
    // Page 0 comes back soon each time, page 1 late: so records pay.
    for clock in (0..3000u32).map(|turn| turn * 1000) {
        for (page, later) in [(0, 1), (1, 900)] {
            region.goes(page, RegionPage::Pool, clock);
            region.came_back(page, clock + later, 64, true, &mut records);
        }
    }
    let rounds = std::iter::from_fn(|| {
        let mut runs = Vec::new();
        take_chunk(&mut region, 0, ChunkHeat::pass_over, &mut runs);
        let stays = region.state(0) == RegionPage::Present;
        assert_eq!(region.state(1), RegionPage::Leaving);
        stays.then_some(())
    });
    assert_eq!(rounds.count(), 7);
}

#[test]
fn pages_are_put_back_from_where_they_were_read() {
    let region = RegionId::of(&std::fs::File::open("/proc/self/stat").expect("a file"));
    let region = region.expect("stat");
    let put = PutOutcome::In(RegionPage::Pool);
    let stored = |page, at| Stored { region, page, at, slot: Slot(0), put };
    // Two chunks of a region, between which a page of another one was read.
    let pages = [stored(0, 0), stored(1, 1), stored(2, 3), stored(3, 4)];
    let runs: Vec<usize> = pages.chunk_by(Stored::is_before).map(<[_]>::len).collect();
    assert_eq!(runs, [2, 2]);
}
