//! Bringing pages back.
//!
//! A page is brought back into the *page cache*: by `UFFDIO_COPY` through the fault's own address
//! space, which maps it there too; where the kernel refuses that (its mappings are changing, or the
//! pages lie in two of them), by writing into the hole of the memory file, which needs no address.
//! Either gives the page whole: no process sees a part of it. Other processes find it in the cache
//! and map it without a fault to the pager.
//!
//! Owns nothing. Everything here runs with the state's lock held, but for [`PageLoader::load`].

use std::ops::Range;

use swaptide_engine::mm::types::PAGES_PER_CHUNK;
use swaptide_ipc::Counter;
use swaptide_store::codec::Unpacker;
use swaptide_store::{Page, Slot};
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::thread::abort_with;

use crate::loading::Load;
use crate::region::{RegionId, RegionPage};
use crate::shortage::{self, Shortage};
use crate::space::{FaultSite, Piece, Space, SpaceId};
use crate::state::{Inner, PagerState, ReclaimOrder, ShortWrite, half_changed, write_pages};
use crate::store::{Store, Unloaded};

/// Most pages that one fault brings in: 2 MiB.
pub(crate) const MAX_PAGES_PER_FAULT: usize = 512;
/// Pages of one load: those that come in before the thread that asked for one of them is woken.
pub(crate) const PAGES_PER_LOAD: usize = 16;

/// Memory of a thread that brings pages in.
pub(crate) struct PageLoader {
    buffer: Vec<u8>,
    unpacker: Unpacker,
}

impl PageLoader {
    /// With room for the most usual window.
    pub fn new() -> PageLoader {
        PageLoader { buffer: vec![0; PAGES_PER_LOAD * PAGE_SIZE], unpacker: Unpacker::new() }
    }

    /// Loads pages into this memory, from where they were when they were noted.
    pub(crate) fn load(&mut self, store: &Store, load: &Load) -> Unloaded {
        let _guard = StopAtPanic;
        let bytes = load.len() * PAGE_SIZE;
        if self.buffer.len() < bytes {
            self.buffer.resize(bytes, 0);
        }
        let (pages, _) = self.buffer[..bytes].as_chunks_mut::<PAGE_SIZE>();
        let mut requests: Vec<(Slot, RegionPage, &mut Page)> =
            load.slots().zip(pages).map(|((slot, place), page)| (slot, place, page)).collect();
        store.load(&mut requests, &mut self.unpacker)
    }

    /// Pages that were loaded, from the `at`-th on.
    fn loaded(&self, at: usize, pages: usize) -> &[u8] {
        &self.buffer[at * PAGE_SIZE..(at + pages) * PAGE_SIZE]
    }
}

/// Without the lock a panic would poison nothing, and faults would wait for the load for ever.
struct StopAtPanic;

impl Drop for StopAtPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            half_changed();
        }
    }
}

impl Inner {
    /// Brings everything back that an address space may need which has no guard, or
    /// whose faults another userfaultfd answers.
    pub(crate) fn restore_space(&self, state: &mut PagerState, id: SpaceId) {
        let regions: Vec<RegionId> = match state.spaces.get_mut(&id) {
            Some(space) => {
                space.restored = true;
                if space.stale {
                    state.regions.keys().copied().collect()
                } else {
                    space.layout.iter().map(|p| p.region).collect()
                }
            }
            None => return,
        };
        let mut all = true;
        for region in regions {
            let pages = state.regions.get(&region).map_or(0, |region| region.pages());
            all &= self.restore(state, region, 0..pages);
        }
        if !all && let Some(space) = state.spaces.get_mut(&id) {
            space.restored = false;
        }
    }

    /// Brings all pages of a range back that are out. False when some are to be brought back later,
    /// for this process is short of something.
    #[must_use]
    pub(crate) fn restore(
        &self,
        state: &mut PagerState,
        id: RegionId,
        pages: Range<usize>,
    ) -> bool {
        let mut all = true;
        let mut loader = PageLoader::new();
        let runs = state
            .regions
            .get(&id)
            .map_or(Vec::new(), |region| region.runs(pages, RegionPage::is_out));
        for run in runs {
            for start in run.clone().step_by(MAX_PAGES_PER_FAULT) {
                all &= self.fill(
                    state,
                    None,
                    id,
                    start..(start + MAX_PAGES_PER_FAULT).min(run.end),
                    &mut loader,
                );
            }
        }
        all
    }

    /// Brings a run of pages back that are all out, all with the lock held. False when some could
    /// not be read, or put in, for want of something of this process's own: they stay out, and are
    /// to be asked for again.
    pub(crate) fn fill(
        &self,
        state: &mut PagerState,
        site: Option<FaultSite>,
        id: RegionId,
        run: Range<usize>,
        loader: &mut PageLoader,
    ) -> bool {
        let Some(region) = state.regions.get(&id) else { return true };
        let load = Load::of(region, run);
        let unloaded = loader.load(&self.store, &load);
        self.put_in(state, (site, None), &load, &unloaded, loader)
    }

    /// Puts in what was loaded, as far as it stands as it was noted ([`Load::stands`]): where, and
    /// the page that a thread waits for. False as with [`Inner::fill`].
    pub(crate) fn put_in(
        &self,
        state: &mut PagerState,
        (site, asked): (Option<FaultSite>, Option<usize>),
        load: &Load,
        unloaded: &Unloaded,
        loader: &PageLoader,
    ) -> bool {
        self.follow_shortage(&mut state.shortages.reads, unloaded);
        let id = load.region;
        let resident = state.counts().resident;
        let region = state.regions.get_mut(&id).filter(|region| load.is_of(region));
        // No process maps the region any more, and so no thread waits.
        let Some(region) = region else { return true };
        let mut short: Vec<usize> = unloaded.short.iter().map(|slot| load.page_of(*slot)).collect();
        short.sort_unstable();
        let mut lost = 0;
        for page in unloaded.failed.iter().map(|slot| load.page_of(*slot)) {
            // What went from there while it was read says nothing of the page.
            if !load.stands(region, page) {
                continue;
            }
            (self.log)(&format!(
                "shared memory: page {page} of region {} could not be brought back",
                id.inode
            ));
            self.count(Counter::PagesPoisoned, 1);
            self.store.free(region.slot(page), region.state(page));
            region.set(page, RegionPage::Lost);
            lost += 1;
        }
        let standing = load.runs(|page| load.stands(region, page));
        let standing: usize = standing.map(|(_, run)| run.len()).sum();
        self.count(Counter::SwpinExists, (load.len() - lost - standing) as u64);
        let is_good = |page| load.stands(region, page) && short.binary_search(&page).is_err();
        let goods: Vec<(usize, Range<usize>)> = load.runs(is_good).collect();
        // Its mappings may be others by now.
        let space = site.and_then(|site| {
            let space = state.spaces.get(&site.space)?;
            let is_mapped = !space.stale && space.layout.contains(&site.piece);
            is_mapped.then_some((space, site.piece))
        });
        let mut brought = Vec::with_capacity(goods.len());
        let mut unwritten = None;
        for (at, good) in &goods {
            let data = loader.loaded(*at, good.len());
            let done = space.map_or(0, |(space, piece)| copy_in(space, &piece, id, good, data));
            let rest = write_pages(&region.memory, good.start + done, &data[done * PAGE_SIZE..]);
            let mut is_in = good.clone();
            if let Err(ShortWrite { written, error }) = rest {
                // What is not there stays out, and is asked for again. What is there may be written
                // to by a program from here on: it is never put in a second time.
                is_in.end = good.start + done + written;
                unwritten.get_or_insert(error);
            }
            for page in is_in.clone() {
                let from = region.state(page);
                let counter = match from {
                    RegionPage::Pool => Counter::Zswpin,
                    RegionPage::Area => Counter::Pswpin,
                    _ => Counter::SwpinZero,
                };
                self.count(counter, 1);
                self.store.free(region.slot(page), from);
                let is_asked = asked == Some(page);
                let ReclaimOrder { clock, records, .. } = &mut state.order;
                if region.came_back(page, *clock, resident, is_asked, records) {
                    self.count(Counter::WorkingsetActivate, 1);
                }
            }
            self.count(Counter::WorkingsetRefault, is_in.len() as u64);
            brought.push(is_in);
        }
        let has_written = brought.iter().any(|run| !run.is_empty());
        self.follow_unwritten(&mut state.shortages.writes, has_written, unwritten.as_ref());
        for chunk in brought
            .iter()
            .flat_map(|run| run.start / PAGES_PER_CHUNK..run.end.div_ceil(PAGES_PER_CHUNK))
        {
            state.enqueue(id, chunk);
        }
        self.publish(&state.counts());
        short.is_empty() && unwritten.is_none()
    }

    /// After an attempt to put pages in: ends the process where none could be for too long.
    fn follow_unwritten(
        &self,
        so_far: &mut Shortage,
        has_written: bool,
        error: Option<&std::io::Error>,
    ) {
        if let Some(error) = error.filter(|_| !so_far.is_any()) {
            (self.log)(&format!(
                "shared memory: no memory for a page that is wanted: {error}; trying again"
            ));
        }
        if !so_far.attempted(has_written, error.is_some(), shortage::bound(self.fail != 0)) {
            let why = error.map_or(String::new(), ToString::to_string);
            abort_with(&[
                b"swaptide: shared memory: no memory for a page that is wanted: ",
                why.as_bytes(),
                b", again and again (limits of the cgroup, ulimit -f); stopped rather than given \
                wrong data",
            ]);
        }
    }

    /// After an attempt to load pages: ends the process where it could not read any for too long,
    /// for want of something of its own.
    fn follow_shortage(&self, so_far: &mut Shortage, unloaded: &Unloaded) {
        let bound = shortage::bound(self.fail != 0);
        if let Some(error) = &unloaded.shortage {
            if !so_far.is_any() {
                (self.log)(&format!(
                    "shared memory: {error}: this process is short of memory or descriptors; \
                     trying again"
                ));
            }
            if !so_far.follow(unloaded, bound) {
                abort_with(&[
                    b"swaptide: shared memory: ",
                    error.to_string().as_bytes(),
                    b", for want of memory or descriptors, again and again (ulimit -n, ulimit -v); \
                    stopped rather than given wrong data",
                ]);
            }
        } else {
            so_far.follow(unloaded, bound);
        }
    }
}

/// Fills addresses of an address space; answers with the pages done, from the first on.
fn copy_in(space: &Space, piece: &Piece, id: RegionId, run: &Range<usize>, data: &[u8]) -> usize {
    let Some(range) = piece.addresses(id, run) else { return 0 };
    if range.pages() != run.len() {
        return 0;
    }
    // SAFETY: the source is the pager's own memory; the destination is a hole of a region, which
    // only this pager fills.
    let progress =
        unsafe { space.uffd.copy_pages(range.start, data.as_ptr(), data.len(), true, false) };
    progress.done / PAGE_SIZE
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use swaptide_ipc::Segment;
    use swaptide_sys::mem::SharedMap;
    use swaptide_sys::{AsFd, Errno};

    use super::*;
    use crate::pager::{PagerSettings, SharedMemoryPager};
    use crate::region::Region;
    use crate::store::{FileOpener, PutOutcome, compressor};

    fn pager() -> SharedMemoryPager {
        let fd = swaptide_sys::mem::memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map");
        let segment = Segment::raw(map).expect("segment");
        let open: FileOpener = Arc::new(|_| Err(Errno::NODEV));
        let settings = PagerSettings { segment, open, log: |_| (), fail: 0, close: drop };
        SharedMemoryPager::start(settings).expect("a pager")
    }

    /// Four pages that differ.
    fn contents() -> Vec<Page> {
        (0..4u8).map(|n| std::array::from_fn(|at| if at < 2000 { n } else { 9 })).collect()
    }

    /// A region that is out, whose file takes no page but the first `fit`.
    fn region(pager: &SharedMemoryPager, contents: &[Page], fit: usize) -> RegionId {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory: File = memfd_create("pages", flags).expect("a file").into();
        memory.set_len((fit * PAGE_SIZE) as u64).expect("its size");
        fcntl_add_seals(&memory, SealFlags::GROW).expect("a seal");
        let id = RegionId::of(&memory).expect("its number");
        let mut region = Region::new(id, Arc::new(memory), contents.len(), 0);
        let inner = pager.inner();
        let mut compressor = compressor(inner.segment);
        for (page, contents) in contents.iter().enumerate() {
            let put = inner.store.put(region.slot(page), contents, &mut compressor);
            assert_eq!(put, PutOutcome::In(RegionPage::Pool));
            region.set(page, RegionPage::Pool);
        }
        inner.lock().regions.insert(id, region);
        id
    }

    #[test]
    fn page_that_cannot_come_in_stays_out() {
        let pager = pager();
        let contents = contents();
        let id = region(&pager, &contents, 1);
        let inner = pager.inner();
        let counted = || inner.segment.slot(inner.index).counted(Counter::Zswpin);
        let mut state = inner.lock();
        assert!(!inner.restore(&mut state, id, 0..4));
        // The first one is in, which is progress.
        assert!(!state.shortages.writes.is_any());
        let memory = Arc::clone(&state.regions[&id].memory);
        let mut first = [0; PAGE_SIZE];
        memory.read_exact_at(&mut first, 0).expect("it is there");
        assert_eq!(first, contents[0]);
        // A program writes to it. What is asked for again is the rest.
        memory.write_all_at(&[77; PAGE_SIZE], 0).expect("a write");
        for _ in 0..3 {
            assert!(!inner.restore(&mut state, id, 0..4));
            assert!(state.shortages.writes.is_any(), "nothing bounds how long it is tried");
        }
        assert_eq!(counted(), 1, "what did not come in is counted");
        memory.read_exact_at(&mut first, 0).expect("it is there");
        assert_eq!(first, [77; PAGE_SIZE]);
        let states: Vec<RegionPage> = (0..4).map(|page| state.regions[&id].state(page)).collect();
        assert_eq!(states[0], RegionPage::Present);
        assert_eq!(states[1..], [RegionPage::Pool; 3]);
        // Its end would wait for them.
        state.regions.remove(&id);
        drop(state);
    }

    #[test]
    fn page_present_already_not_loaded_again() {
        let pager = pager();
        let contents = contents();
        let id = region(&pager, &contents, 4);
        let inner = pager.inner();
        let counted = |counter: Counter| inner.segment.slot(inner.index).counted(counter);
        let mut loader = PageLoader::new();
        let mut state = inner.lock();
        let load = Load::of(&state.regions[&id], 0..4);
        // Another thread brings one page in while this one loads; the program writes to it.
        assert!(inner.restore(&mut state, id, 1..2));
        let unloaded = loader.load(&inner.store, &load);
        let memory = Arc::clone(&state.regions[&id].memory);
        memory.write_all_at(&[77; PAGE_SIZE], PAGE_SIZE as u64).expect("a write");
        assert!(inner.put_in(&mut state, (None, None), &load, &unloaded, &loader));
        assert_eq!(unloaded.failed, [Slot(1)], "its data was dropped when it came in");
        assert_eq!((counted(Counter::SwpinExists), counted(Counter::PagesPoisoned)), (1, 0));
        let read = |page: usize| {
            let mut found = [0; PAGE_SIZE];
            memory.read_exact_at(&mut found, (page * PAGE_SIZE) as u64).expect("it is there");
            found
        };
        assert_eq!(read(1), [77; PAGE_SIZE]);
        for page in [0, 2, 3] {
            assert_eq!(read(page), contents[page]);
        }
        // A load of a region that is gone puts nothing anywhere.
        let region = state.regions.remove(&id).expect("the region");
        assert!(inner.put_in(&mut state, (None, None), &load, &unloaded, &loader));
        assert!((0..4).all(|page| region.state(page) == RegionPage::Present));
        drop(state);
    }
}
