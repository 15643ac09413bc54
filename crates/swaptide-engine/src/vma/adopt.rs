//! Adoption: finding the program's memory and putting it under management.
//!
//! A mapping is adopted whole: registering a part of it would split it, and `mremap` over a split
//! mapping fails.
//!
//! Rules
//! 1. Adopted are private, anonymous mappings of at least [`MIN_BYTES`] (smaller ones where they
//!    matter: [`crate::memcg::small`]) that are readable and writable, or that are reserved without
//!    any access (an allocator opens them piece by piece, and each piece would be a new mapping
//!    otherwise), except the engine's own memory, the main thread's stack, and the zero-initialised
//!    data of libraries (the engine's threads may use libc's). What lies behind a library is the
//!    program's: the kernel maps a library right below what was mapped before it. What a program
//!    maps above 2^47 by a hint, where the CPU has five levels of page tables, is not in the
//!    engine's table and stays as it is.
//! 2. A range enters the list of regions only after: its registration; a check that it is one
//!    mapping armed with this userfaultfd while no change of mappings is unread
//!    ([`Coverage::Whole`]); and a scan that marks the pages the program already has.
//! 3. A fault at an address that is not managed but armed (the tail of a mapping that grew) adopts
//!    the mapping then.
//!
//! 4. A large mapping that the program makes through libc is adopted before its maker gets it: a
//!    program fills it before the next scan.
//!
//! 5. Where the program has read and not yet written, the kernel has mapped its page of zeros, and
//!    would answer the first write without a fault that user space sees. What is so in whole chunks
//!    goes out at once, so that growth there is seen, too.
//!
//! 6. What is registered and not listed yet stands in `Mm::armed`, from before its registration on:
//!    its changes send events. Its arming is remembered for the children of forks that are read
//!    later ([`crate::fork::layout`]).
//!
//! 7. Nothing of the engine's is ever armed. What was the program's when it was listed may be gone,
//!    and the engine's in its place: the last scan is made while no thread of the engine maps
//!    anything ([`arm`]).
//!
//! 8. What the program keeps apart from its children stays as it is, wherever it is moved to
//!    ([`crate::vma::fork_advice`]).
//!
//! Only the handler adopts: the order of registration, events and the list is its own.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::Counter;
use swaptide_store::file::own_ring_mappings;
use swaptide_sys::maps::{Vma, for_each_vma};
use swaptide_sys::mem::{hold_still, own_ranges};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::thread::now;
use swaptide_sys::uffd::Coverage;

use crate::engine::Engine;
use crate::events::apply::remember;
use crate::events::reader::Interrupted;
use crate::fault::path::FaultPath;
use crate::memcg::small::Candidates;
use crate::mm::dontfork;
use crate::mm::types::{
    CHUNKS_PER_LEAF, ChunkNo, MANAGED_END, MIN_BYTES, PAGES_PER_CHUNK, PageNo, pages_of,
};
use crate::mm::vma_change::VmaChange;
use crate::reclaim::worker::Step;
use crate::requests::fork_control::NO_FORK;
use crate::vma::elf_bss;
use crate::vma::fork_advice::ForkAdvice;
use crate::vma::unmovable::{self, Unmovable};

/// Runs of the kernel's page of zeros that one adoption takes out.
const MAX_ZERO_RUNS: usize = 4096;

/// What follows a library's written data is its zero-initialised data, up to this size; what is
/// larger is not libc's.
const LIBRARY_BSS_BYTES: usize = 16 << 20;

const MAPS_BUFFER_BYTES: usize = 64 << 10;

/// Finds mappings that are to be managed, and registers them.
pub(crate) struct Adopter {
    maps_buf: Box<[u8]>,
    /// Buffers of one scan: what it found, and what of a range is not managed.
    found: Vec<VirtRange>,
    gaps: Vec<VirtRange>,
    /// The parts of the mappings adopted last that have the kernel's page of zeros.
    zeros_mapped: Vec<VirtRange>,
    /// Small mappings that the scan under way has found.
    candidates: Candidates,
    /// Memory that cannot go out.
    unmovable: Unmovable,
    /// Memory that children are not to have.
    fork_advice: ForkAdvice,
}

impl Adopter {
    /// With its buffers.
    pub(crate) fn new() -> Adopter {
        Adopter {
            maps_buf: vec![0; MAPS_BUFFER_BYTES].into_boxed_slice(),
            found: Vec::with_capacity(256),
            gaps: Vec::with_capacity(16),
            zeros_mapped: Vec::with_capacity(64),
            candidates: Candidates::default(),
            unmovable: Unmovable::default(),
            fork_advice: ForkAdvice::default(),
        }
    }

    /// Adopts what there is to adopt.
    ///
    /// # Errors
    /// [`Interrupted`] when a fork through no hook was read: it is to be called again.
    pub(crate) fn adopt(&mut self, path: &mut FaultPath) -> Result<(), Interrupted> {
        let mut found = std::mem::take(&mut self.found);
        let began = now();
        self.fork_advice.begin(path.engine, &mut self.maps_buf);
        self.list(path, &mut found);
        let done = if ForkAdvice::matters(path.engine) {
            self.adopt_looked_up(path, &found)
        } else {
            found.iter().try_for_each(|range| self.adopt_gaps(path, *range, false))
        };
        self.found = found;
        path.engine.small.looked(began);
        path.engine.publish_usage(&path.engine.mm.lock());
        done?;
        self.take_zeros_out(path)
    }

    /// True if small mappings are to be managed, by the result of the last scan.
    pub(crate) fn small_mappings_matter(&self, engine: &Engine) -> bool {
        engine.small.found(self.candidates.bytes(), &engine.charge);
        engine.small.are_managed()
    }

    /// Lists the parts of mappings that are to be managed.
    fn list(&mut self, path: &mut FaultPath, found: &mut Vec<VirtRange>) {
        found.clear();
        self.zeros_mapped.clear();
        let engine = path.engine;
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        let looks = self.unmovable.begin(&engine.charge);
        let mut last_file_end = VirtAddr(0);
        let mut last_file_main = false;
        // Where a file was last mapped from its beginning on, with its inode; the same of the file
        // with the written data.
        let mut head = (0, VirtAddr(0));
        let mut last_file_head = None;
        let own_rings = own_ring_mappings();
        let mut rings = 0;
        let listed = for_each_vma(&mut self.maps_buf, |mut vma| {
            let is_unforked =
                || vma.is_private_anon() && self.fork_advice.is_said_of(engine, vma.range);
            let kind = || match unmovable::kind(&vma) {
                None if is_unforked() => Some(unmovable::UNFORKED),
                kind => kind,
            };
            if looks && let Some(kind) = kind() {
                let is_managed = engine.mm.lock().regions.overlaps(vma.range);
                let pagemap = &mut path.installer.pagemap;
                self.unmovable.add_mapping(kind, vma.range, pagemap, is_managed);
            }
            if vma.inode != 0 {
                rings += usize::from(vma.name == b"anon_inode:[io_uring]");
                if vma.private && vma.offset == 0 {
                    head = (vma.inode, vma.range.start);
                }
                if vma.private && vma.write {
                    last_file_end = vma.range.end;
                    last_file_main = (engine.start.main_object)(vma.name);
                    last_file_head = (head.0 == vma.inode).then_some(head.1);
                }
                return true;
            }
            let behind = vma.range.start == last_file_end && !last_file_main;
            if behind && eligible(&vma) {
                // An end before its own data is not that library's.
                let end =
                    last_file_head.and_then(elf_bss::end).filter(|end| *end >= vma.range.start);
                let end = end.unwrap_or(vma.range.end).min(vma.range.end);
                if end.0 - vma.range.start.0 <= LIBRARY_BSS_BYTES {
                    vma.range.start = end;
                }
            }
            if eligible(&vma) && !(engine.start.excluded)(vma.range) {
                program_parts(vma.range, |part| found.push(part));
            } else if is_small(&vma) && !behind && !(engine.start.excluded)(vma.range) {
                let managed = engine
                    .mm
                    .lock()
                    .regions
                    .find(vma.range.start)
                    .is_some_and(|region| region.end >= vma.range.end);
                if !managed {
                    candidates.add(vma.range);
                }
            }
            true
        });
        // A ring of the program's, made past libc: it sends pages by reference (`SEND_ZC`).
        if rings > own_rings.max(own_ring_mappings()) {
            engine.start.references.note();
        }
        if listed.is_err() {
            (engine.start.log)("cannot read /proc/self/maps: new mappings are not managed");
        }
        if looks {
            self.unmovable.end(engine, &mut path.installer.pagemap, &mut self.maps_buf);
        }
        engine.small.found(candidates.bytes(), &engine.charge);
        if engine.small.are_managed() {
            // Where room is short the makers of new ones wait for this thread from here on, or a
            // program that fills them at full speed would be far past its limit before the next
            // look.
            engine.small.follow(&engine.charge);
            let are_more = candidates.take(|range| program_parts(range, |part| found.push(part)));
            engine.small.look_again(are_more);
        }
        self.candidates = candidates;
    }

    /// Adopts what of a range is not managed yet. `is_new`: its maker waits for that.
    fn adopt_gaps(
        &mut self,
        path: &mut FaultPath,
        range: VirtRange,
        is_new: bool,
    ) -> Result<(), Interrupted> {
        let mut gaps = std::mem::take(&mut self.gaps);
        gaps.clear();
        path.engine.mm.lock().regions.gaps(range, |gap| gaps.push(gap));
        let done = gaps.iter().try_for_each(|gap| self.adopt_range(path, *gap, is_new));
        self.gaps = gaps;
        done
    }

    /// Takes out the chunks in which the program has nothing but the kernel's page of zeros (rule
    /// 5).
    fn take_zeros_out(&mut self, path: &mut FaultPath) -> Result<(), Interrupted> {
        let engine = path.engine;
        let mut left = 0;
        {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            let chunks_of = |run: &VirtRange| {
                let pages = pages_of(*run);
                pages.start.div_ceil(PAGES_PER_CHUNK)..pages.end / PAGES_PER_CHUNK
            };
            // One chunk of each stretch goes first: a program that writes its memory in order meets
            // one soon, and waits there.
            for is_first in [false, true] {
                for chunk in self.zeros_mapped.iter().rev().flat_map(|run| chunks_of(run).rev()) {
                    let chunk = ChunkNo(chunk);
                    if chunk.0.is_multiple_of(CHUNKS_PER_LEAF) == is_first
                        && mm.table.chunk(chunk).present == u16::MAX
                    {
                        mm.queues.first_to_go(&mut mm.table, chunk);
                        left += PAGES_PER_CHUNK;
                    }
                }
            }
            self.zeros_mapped.clear();
        }
        let mut again = 0;
        while left > 0 && again < 16 && engine.workers.quiesce.load(Relaxed) == 0 {
            match path.worker.step_of(engine, CHUNKS_PER_LEAF) {
                Step::Took(pages) => left = left.saturating_sub(pages),
                Step::Again => {
                    again += 1;
                    path.reader.drain()?;
                }
                Step::Nothing => return Ok(()),
            }
        }
        Ok(())
    }

    /// Adopts the mapping that holds an address, if it is one to adopt. `is_new`: its maker waits
    /// for that, and no other thread knows it.
    ///
    /// # Errors
    /// As for [`Adopter::adopt`].
    pub(crate) fn adopt_mapping(
        &mut self,
        path: &mut FaultPath,
        addr: VirtAddr,
        is_new: bool,
    ) -> Result<(), Interrupted> {
        let engine = path.engine;
        self.fork_advice.begin(engine, &mut self.maps_buf);
        let maps = &mut path.installer.maps;
        let Ok(Some(info)) = maps.vma_at(addr) else { return Ok(()) };
        let vma = info.vma();
        // What follows a file's pages may be the zero-initialised data of a library: the scan at
        // all mappings tells.
        let follows_file = vma.range.start.0 > 0
            && maps
                .vma_at(VirtAddr(vma.range.start.0 - 1))
                .is_ok_and(|before| before.is_some_and(|before| before.vma().inode != 0));
        let small = engine.small.are_managed() && is_small(&vma);
        if follows_file || !(eligible(&vma) || small) || (engine.start.excluded)(vma.range) {
            return Ok(());
        }
        let range = vma.range;
        let mut parts = std::mem::take(&mut self.found);
        parts.clear();
        program_parts(range, |part| parts.push(part));
        let done = parts.iter().try_for_each(|part| self.adopt_gaps(path, *part, is_new));
        self.found = parts;
        done
    }

    /// Adopts what of some ranges is not managed yet, but for what has advice of
    /// [`crate::vma::fork_advice`]: all that is armed is looked up together.
    fn adopt_looked_up(
        &mut self,
        path: &mut FaultPath,
        ranges: &[VirtRange],
    ) -> Result<(), Interrupted> {
        let engine = path.engine;
        let mut gaps = Vec::new();
        for range in ranges {
            engine.mm.lock().regions.gaps(*range, |gap| gaps.push(gap));
        }
        let mut armed = Vec::with_capacity(gaps.len());
        for gap in gaps {
            if !self.fork_advice.holds(engine, &mut self.maps_buf, &path.installer.maps, gap) {
                armed.extend(self.arm_gap(path, gap)?.map(|range| (gap, range, false)));
            }
        }
        if armed.is_empty() {
            return Ok(());
        }
        // Nothing is read from here on to the second look at the coverage.
        let uffd = path.reader.uffd;
        for (_, range, is_whole) in &mut armed {
            *is_whole = uffd.coverage(*range) == Coverage::Whole;
        }
        self.fork_advice.look_everywhere(engine, &mut self.maps_buf);
        for (_, range, is_whole) in &mut armed {
            *is_whole = *is_whole
                && !self.fork_advice.is_in(engine, &path.installer.maps, *range)
                && uffd.coverage(*range) == Coverage::Whole;
        }
        for (_, range, _) in armed.iter().filter(|(.., is_whole)| *is_whole) {
            self.manage(path, *range);
        }
        armed
            .into_iter()
            .filter(|(.., is_whole)| !is_whole)
            .try_for_each(|(gap, range, _)| self.adopt_armed(path, gap, range, false))
    }

    /// Adopts one range, of which nothing is managed.
    fn adopt_range(
        &mut self,
        path: &mut FaultPath,
        range: VirtRange,
        is_new: bool,
    ) -> Result<(), Interrupted> {
        let engine = path.engine;
        if !is_new
            && ForkAdvice::matters(engine)
            && self.fork_advice.holds(engine, &mut self.maps_buf, &path.installer.maps, range)
        {
            return Ok(());
        }
        match self.arm_gap(path, range)? {
            Some(armed) => self.adopt_armed(path, range, armed, is_new),
            None => Ok(()),
        }
    }

    /// Arms a range of which nothing is managed, with what its mapping has grown by since.
    fn arm_gap(
        &mut self,
        path: &mut FaultPath,
        gap: VirtRange,
    ) -> Result<Option<VirtRange>, Interrupted> {
        let_changes_pass(path, gap)?;
        if !arm(path.engine, gap) {
            return Ok(None);
        }
        // A fork that was not read yet may be from before or after it.
        remember(&mut path.engine.mm.lock(), VmaChange::Armed(gap));
        Ok(Some(register_tail(path, gap, &self.fork_advice)))
    }

    /// Lists a range that is armed, `gap` and what it has grown by.
    fn adopt_armed(
        &mut self,
        path: &mut FaultPath,
        gap: VirtRange,
        range: VirtRange,
        is_new: bool,
    ) -> Result<(), Interrupted> {
        let engine = path.engine;
        let mut read = Ok(());
        for _ in 0..16 {
            match self.coverage(path, range, is_new) {
                (Coverage::Whole, false) => {
                    self.manage(path, range);
                    return Ok(());
                }
                // It was moved there a moment ago.
                (Coverage::Whole, true) => break,
                (Coverage::Changing, _) => {
                    read = path.reader.drain();
                    if read.is_err() {
                        break;
                    }
                }
                // It changed between the listing and the registration. What is armed of it is
                // adopted when it faults or at the next scan.
                (Coverage::NotWhole | Coverage::Gone, _) => {
                    self.disarm_others(path, gap);
                    break;
                }
            }
        }
        // An event that was read meanwhile may have been about what was there before.
        engine.mm.lock().armed.insert(range);
        read
    }

    /// How an armed range stands, and if it is one mapping whether that has advice of
    /// [`crate::vma::fork_advice`]: no change is unread from before it was looked at to after it.
    fn coverage(&mut self, path: &FaultPath, range: VirtRange, is_new: bool) -> (Coverage, bool) {
        let (engine, uffd) = (path.engine, path.reader.uffd);
        let before = uffd.coverage(range);
        if is_new || before != Coverage::Whole || !ForkAdvice::matters(engine) {
            return (before, false);
        }
        let maps = &path.installer.maps;
        let has_fork_advice = self.fork_advice.has(engine, &mut self.maps_buf, maps, range);
        (uffd.coverage(range), has_fork_advice)
    }

    /// True if an armed address was found to have such advice a moment ago.
    pub(crate) fn has_fork_advice(&self, engine: &Engine, addr: VirtAddr) -> bool {
        self.fork_advice.is_known(engine, VirtRange::from_len(addr.page_down(), PAGE_SIZE))
    }

    /// Disarms what of a range is not the program's private memory. That stays armed: it may be a
    /// managed mapping that was moved there meanwhile, which without its registration would read as
    /// zeros where it is swapped. One that was moved there between the look and the disarming is
    /// armed again: its mover waits until its event is read.
    fn disarm_others(&mut self, path: &FaultPath, range: VirtRange) {
        let uffd = path.reader.uffd;
        let part_of = |other: VirtRange| VirtRange {
            start: other.start.max(range.start),
            end: other.end.min(range.end),
        };
        let disarm = |other: VirtRange| {
            let part = part_of(other);
            if part.start < part.end {
                let _ = uffd.unregister(part);
            }
        };
        own_ranges(disarm);
        let _ = for_each_vma(&mut self.maps_buf, |vma| {
            if !vma.is_private_anon() {
                disarm(vma.range);
            }
            vma.range.end < range.end
        });
        if uffd.coverage(range) != Coverage::Changing {
            return;
        }
        let mut moved = Vec::new();
        let _ = for_each_vma(&mut self.maps_buf, |vma| {
            let part = part_of(vma.range);
            if vma.is_private_anon() && part.start < part.end {
                moved.push(part);
            }
            vma.range.end < range.end
        });
        for part in moved {
            arm(path.engine, part);
        }
    }

    /// Marks what the program has of an armed range and lists it.
    fn manage(&mut self, path: &FaultPath, range: VirtRange) {
        let engine = path.engine;
        // While a fork past libc is held for, it comes along, and is closed after it. During one
        // that is followed it comes along as what is open does.
        let is_forking = engine.fork.followed && engine.fork.phase.load(Relaxed) != NO_FORK;
        let is_open = is_forking && dontfork::allow(range).is_ok();
        let is_closed = engine.fork.followed && !is_open && !engine.fork.is_held();
        if is_closed {
            let is_denied = dontfork::deny(range).is_ok();
            let is_whole = path.reader.uffd.coverage(range) == Coverage::Whole;
            if !is_denied && is_whole {
                // What cannot be kept out of forks stays as it is. Nothing of it is out.
                let _ = path.reader.uffd.unregister(range);
                engine.mm.lock().armed.remove(range);
            }
            if !is_whole {
                // Something else may have taken its place meanwhile: that is read.
                engine.mm.lock().changes.closed_in_doubt.insert(range);
            }
            if !is_denied {
                return;
            }
        }
        let mut mm = engine.mm.lock();
        mm.armed.remove(range);
        mm.changes.left.remove(range);
        mm.regions.insert(range);
        let zeros = &mut self.zeros_mapped;
        let scanned = path.installer.pagemap.runs(range, |run| {
            for page in pages_of(run.range) {
                mm.mark_present(PageNo(page));
            }
            let is_chunk = run.range.len() >= PAGES_PER_CHUNK * PAGE_SIZE;
            if run.zero && !run.swapped && is_chunk && zeros.len() < MAX_ZERO_RUNS {
                zeros.push(run.range);
            }
        });
        if scanned.is_err() {
            // Pages whose presence is not known are simply never taken out.
            (engine.start.log)("cannot read the page map: pages of new mappings stay in memory");
        }
        path.installer.look_at_adopted(range);
        engine.count(Counter::RegionsAdopted, 1);
    }

    /// A fault came from an address that is not managed. True when its mapping is managed now.
    pub(crate) fn adopt_at(&mut self, path: &mut FaultPath, addr: VirtAddr) -> bool {
        let Ok(Some(info)) = path.installer.maps.vma_at(addr) else { return false };
        let range = info.vma().range;
        let mut part = None;
        program_parts(range, |p| {
            if p.contains(addr) {
                part = Some(p);
            }
        });
        let Some(part) = part else { return false };
        if self.has_fork_advice(path.engine, addr)
            || self.coverage(path, part, false) != (Coverage::Whole, false)
        {
            return false;
        }
        let mut gaps = std::mem::take(&mut self.gaps);
        gaps.clear();
        path.engine.mm.lock().regions.gaps(part, |gap| gaps.push(gap));
        for gap in &gaps {
            self.manage(path, *gap);
        }
        self.gaps = gaps;
        path.engine.mm.lock().regions.find(addr).is_some()
    }

    /// Lists what of moved or grown mappings is armed and not listed yet, and lets the threads go
    /// on that wait for that at a fence.
    ///
    /// # Errors
    /// As for [`Adopter::adopt`]; a thread whose mapping is not listed yet still waits.
    pub(crate) fn answer_fences(&mut self, path: &mut FaultPath) -> Result<(), Interrupted> {
        let engine = path.engine;
        engine.handler_requests.answer_fences(|at, is_new| {
            let adopted = self.adopt_mapping(path, at, is_new);
            match adopted {
                Ok(()) => path.reader.is_about_to_wake(),
                // What was listed until then was not followed by a scan.
                Err(Interrupted) => path.reader.fork.seen_waiting = false,
            }
            adopted
        })
    }
}

/// Arms a range, and notes that (rule 6). False when something of it is the engine's (rule 7),
/// or the kernel refuses.
pub(crate) fn arm(engine: &Engine, range: VirtRange) -> bool {
    let was_armed = {
        let mut mm = engine.mm.lock();
        let was_armed = mm.armed.overlaps(range);
        mm.armed.insert(range);
        was_armed
    };
    let is_armed = hold_still().is_some_and(|_still| {
        let mut is_own = false;
        own_ranges(|own| is_own |= own.start < range.end && range.start < own.end);
        !is_own && engine.uffd().register_missing(range).is_ok()
    });
    // A part that was armed before still is.
    if !is_armed && !was_armed {
        engine.mm.lock().armed.remove(range);
    }
    is_armed
}

/// Where something else was a moment ago: waits until no fork can be older than that, if that
/// comes soon. What a child still has there could not be told from what is about to be armed.
fn let_changes_pass(path: &mut FaultPath, range: VirtRange) -> Result<(), Interrupted> {
    for _ in 0..16 {
        let engine = path.engine;
        {
            let mut mm = engine.mm.lock();
            if !mm.changes.recent.iter().any(|change| change.concerns(range)) {
                return Ok(());
            }
            if path.reader.fork.untracked.is_empty()
                && !path.reader.fork.phase.is_deferring()
                && path.reader.uffd.coverage(engine.handler_requests.range()) != Coverage::Changing
            {
                mm.changes.recent.clear();
                return Ok(());
            }
        }
        path.reader.drain()?;
    }
    Ok(())
}

/// The mapping may have grown since it was listed: then the registration has split it, and the
/// tail is registered at once, which joins it again. Returns the whole. A neighbour that does
/// not join is a mapping of its own (another advice was given for it, say): it stays armed, and
/// is adopted by itself.
fn register_tail(path: &mut FaultPath, mut range: VirtRange, advice: &ForkAdvice) -> VirtRange {
    for _ in 0..4 {
        let Ok(Some(info)) = path.installer.maps.vma_at(range.end) else { return range };
        let vma = info.vma();
        if path.engine.mm.lock().regions.find(range.end).is_some() {
            return range;
        }
        let tail = vma.range.start == range.end
            && vma.range.end <= MANAGED_END
            && vma.private
            && vma.inode == 0
            && vma.read
            && vma.write
            && !vma.exec;
        if !tail
            || vma.name.starts_with(b"[stack")
            || (path.engine.start.excluded)(vma.range)
            || advice.is_known(path.engine, vma.range)
        {
            return range;
        }
        let end = vma.range.end;
        if !arm(path.engine, vma.range) {
            return range;
        }
        match path.installer.maps.vma_at(range.start) {
            Ok(Some(joined)) if joined.vma().range.end >= end => range.end = end,
            _ => return range,
        }
    }
    range
}

fn eligible(vma: &Vma<'_>) -> bool {
    vma.range.len() >= MIN_BYTES && vma.read == vma.write && is_plain(vma)
}

/// A mapping that would be managed if it were larger. One without access is none: it is a guard,
/// whatever follows it.
fn is_small(vma: &Vma<'_>) -> bool {
    vma.range.len() < MIN_BYTES && vma.read && vma.write && is_plain(vma)
}

fn is_plain(vma: &Vma<'_>) -> bool {
    vma.private
        && !vma.exec
        && vma.inode == 0
        && vma.range.end <= MANAGED_END
        && (vma.name.is_empty() || vma.name == b"[heap]" || vma.name.starts_with(b"[anon:"))
}

/// The parts of a mapping that are not the engine's own: the kernel joins neighbouring anonymous
/// mappings.
pub fn program_parts(range: VirtRange, mut f: impl FnMut(VirtRange)) {
    let mut own = [VirtRange { start: VirtAddr(0), end: VirtAddr(0) }; 64];
    let mut n = 0;
    let mut overflow = false;
    own_ranges(|r| {
        let cut = VirtRange { start: r.start.max(range.start), end: r.end.min(range.end) };
        if cut.start < cut.end {
            match own.get_mut(n) {
                Some(place) => *place = cut,
                None => overflow = true,
            }
            n += 1;
        }
    });
    if overflow {
        return;
    }
    let own = &mut own[..n];
    own.sort_unstable_by_key(|r| r.start);
    let mut at = range.start;
    for r in own.iter() {
        if at < r.start {
            f(VirtRange { start: at, end: r.start });
        }
        at = at.max(r.end);
    }
    if at < range.end {
        f(VirtRange { start: at, end: range.end });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: usize, end: usize) -> Vma<'static> {
        Vma {
            range: VirtRange { start: VirtAddr(start), end: VirtAddr(end) },
            read: true,
            write: true,
            exec: false,
            private: true,
            device: swaptide_sys::maps::DeviceNumber { major: 0, minor: 0 },
            inode: 0,
            offset: 0,
            name: b"",
        }
    }

    #[test]
    fn range_above_table_not_adopted() {
        let end = MANAGED_END.0;
        assert!(eligible(&mapping(end - MIN_BYTES, end)));
        assert!(!eligible(&mapping(end - MIN_BYTES, end + PAGE_SIZE)), "a mapping across the end");
        assert!(!eligible(&mapping(1 << 50, (1 << 50) + MIN_BYTES)), "an address of five levels");
    }

    #[test]
    fn a_walk_and_a_look_above_the_table_find_nothing() {
        use crate::mm::page_table::{PageState, PageTable};
        let mut table = PageTable::new();
        let above = PageNo::of(VirtAddr(1 << 52));
        assert_eq!(table.set(above, PageState::Empty), PageState::Empty);
        assert_eq!(table.get(above), PageState::Empty);
        assert_eq!(table.next_used(above, above.plus(1 << 20)), None);
        assert_eq!(table.next_used(PageNo(0), PageNo(usize::MAX >> 12)), None);
        table.update(above.chunk(), |_| unreachable!("nothing is known there"));
    }
}
