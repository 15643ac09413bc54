//! Managed mappings are opened for a fork that is followed, and closed after it
//! ([`crate::mm::dontfork`]).
//!
//! Locks: the memory lock, for one check.

use swaptide_sys::Errno;
use swaptide_sys::advise_each::MAX_ADVISED;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::Advice;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::uffd::Coverage;

use crate::engine::{Engine, NO_RANGE};
use crate::fault::path::FaultPath;
use crate::mm::dontfork::{advise_fork, advise_fork_each, allow};
use crate::pager::Pager;
use crate::vma::adopt::{arm, program_parts};

/// Lists what mappings have grown by. Growing sends no event, and what came so has the advice of
/// the rest: it would be missing in the child.
///
/// What is armed behind a region may be the program's own as well, which has a userfaultfd of its
/// own there: the kernel refuses to arm that for another.
pub(super) fn list_grown(pager: &mut Pager) {
    let engine = pager.path.engine;
    let Pager { path, adopter } = pager;
    let mut list = |region: VirtRange| {
        let Ok(Some(info)) = path.installer.maps.vma_at(region.end) else { return };
        let vma = info.vma();
        if !vma.is_private_anon() || engine.mm.lock().regions.find(region.end).is_some() {
            return;
        }
        let tail = VirtRange { start: region.end, end: vma.range.end };
        // In this order: arming what is armed already changes nothing, and what is not registered
        // is not to be armed.
        if path.reader.uffd.coverage(tail) == Coverage::Whole && arm(engine, tail) {
            let _ = adopter.adopt_at(path, region.end);
        }
    };
    some_regions(engine, |regions| regions.iter().for_each(|region| list(*region)));
}

/// Lists what moves have left mapped (`MREMAP_DONTUNMAP`). No event tells of it, and it has the
/// advice of what was moved: it would be missing in the child. No change of mappings may be under
/// way: then a place is still mapped if no event has said that it was left.
pub(super) fn list_left(pager: &mut Pager) {
    let engine = pager.path.engine;
    let mut places = Vec::new();
    {
        let mut mm = engine.mm.lock();
        places.append(&mut mm.changes.owed);
        places.extend(mm.armed.iter());
        for place in &places {
            mm.armed.insert(*place);
        }
    }
    let Pager { path, adopter } = pager;
    for place in places {
        let mut is_changing = false;
        let mut at = place.start;
        while let Ok(Some(info)) = path.installer.maps.vma_at_or_next(at) {
            let vma = info.vma();
            at = vma.range.end;
            let part = VirtRange {
                start: vma.range.start.max(place.start),
                end: vma.range.end.min(place.end),
            };
            if part.is_empty() {
                break;
            }
            if !vma.is_private_anon() {
                continue;
            }
            // In this order, as for what has grown.
            match path.reader.uffd.coverage(part) {
                Coverage::Whole if arm(engine, part) => {
                    let _ = adopter.adopt_at(path, part.start);
                }
                Coverage::Changing => is_changing = true,
                _ => {}
            }
        }
        if !is_changing {
            // What is not listed now is not armed.
            engine.mm.lock().armed.remove(place);
        }
    }
}

/// Opens all that is managed. Allocates nothing.
pub(super) fn allow_fork_of_regions(path: &mut FaultPath) {
    let maps = &mut path.installer.maps;
    some_regions(path.engine, |regions| {
        let mut is_marked = [true; MAX_ADVISED];
        advise_fork_each(regions, Advice::Random, |at, _| is_marked[at] = false);
        let mut marked = [NO_RANGE; MAX_ADVISED];
        let mut count = 0;
        for (region, is_marked) in regions.iter().zip(is_marked) {
            if is_marked {
                marked[count] = *region;
                count += 1;
            } else {
                allow_what_is_left(maps, *region);
            }
        }
        let marked = &marked[..count];
        advise_fork_each(marked, Advice::DoFork, |at, _| allow_what_is_left(maps, marked[at]));
    });
}

/// Something of a region was unmapped a moment ago: what is left is opened piece by piece.
fn allow_what_is_left(maps: &mut MapsFile, region: VirtRange) {
    let mut at = region.start;
    while let Ok(Some(info)) = maps.vma_at_or_next(at) {
        let vma = info.vma().range;
        if vma.start >= region.end {
            return;
        }
        let _ =
            allow(VirtRange { start: vma.start.max(region.start), end: vma.end.min(region.end) });
        at = vma.end;
    }
}

/// Closes all that is managed: after a fork, in the parent and in the child.
pub(super) fn deny_fork(engine: &Engine) {
    some_regions(engine, |regions| {
        advise_fork_each(regions, Advice::Normal, |_, _| {});
        advise_fork_each(regions, Advice::DontFork, |at, errno| {
            // The hole in it is told of by an event that is still to be read.
            if errno != Errno::NOMEM {
                (engine.start.log)(&format!(
                    "memory at {:x} would be zeros in a child past libc's fork ({})",
                    regions[at].start.0,
                    swaptide_sys::ErrnoName(errno)
                ));
            }
        });
    });
}

/// What of a range is the program's comes along at forks: it was closed though it is not managed.
pub(super) fn allow_again(engine: &Engine, path: &mut FaultPath, range: VirtRange) {
    let mut at = range.start;
    while let Ok(Some(info)) = path.installer.maps.vma_at_or_next(at) {
        let vma = info.vma().range;
        if vma.start >= range.end {
            return;
        }
        let part = VirtRange { start: vma.start.max(range.start), end: vma.end.min(range.end) };
        if !(engine.start.excluded)(part) {
            program_parts(part, |part| {
                let _ = advise_fork(part, Advice::DoFork);
            });
        }
        at = vma.end;
    }
}

/// Calls `f` with all regions, some at a time. Only the caller changes them.
fn some_regions(engine: &Engine, mut f: impl FnMut(&[VirtRange])) {
    let mut some = [NO_RANGE; MAX_ADVISED];
    let mut at = VirtAddr(0);
    loop {
        let count = {
            let mm = engine.mm.lock();
            let mut count = 0;
            while let Some(place) = some.get_mut(count)
                && let Some(region) = mm.regions.at_or_after(at)
            {
                *place = region;
                at = region.end;
                count += 1;
            }
            count
        };
        if count == 0 {
            return;
        }
        f(&some[..count]);
    }
}
