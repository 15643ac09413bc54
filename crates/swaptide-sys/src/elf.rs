//! How an agent gets into a program: by its loader, or by the supervisor. Judged by the headers of
//! its ELF file.
//!
//! Owns nothing. Locks: none; nothing is allocated.

use rustix::fd::BorrowedFd;

use crate::procfs::retry;

/// How an agent gets into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Its loader preloads it.
    Loads,
    /// It has no loader.
    Static,
    /// Its loader is musl's, which cannot load the agent.
    Musl,
    /// It is a loader or another library, which is executed itself.
    Library,
}

impl ProgramKind {
    /// True where the supervisor must put it in.
    pub fn is_injected(self) -> bool {
        matches!(self, ProgramKind::Static | ProgramKind::Musl)
    }
}

const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const ET_EXEC: u16 = 2;
const EM_X86_64: u16 = 62;
const DT_FLAGS_1: u64 = 0x6fff_fffb;
const DF_1_PIE: u64 = 0x0800_0000;
/// Bytes of a program header.
const ENTRY_BYTES: usize = 56;
/// Entries of a dynamic section that are read.
const MAX_DYNAMIC_ENTRIES: u64 = 1024;

/// The kind of a 64-bit x86 program. `None`: it is none, is damaged, or cannot be read.
pub fn kind_of(file: BorrowedFd<'_>) -> Option<ProgramKind> {
    let mut head = [0u8; 64];
    read_exact(file, &mut head, 0)?;
    if !head.starts_with(b"\x7fELF\x02\x01") || u16_at(&head, 18)? != EM_X86_64 {
        return None;
    }
    if let Some((at, bytes)) = segment(file, &head, PT_INTERP)? {
        let mut name = [0u8; 64];
        let name = &mut name[..(bytes as usize).min(64)];
        read_exact(file, name, at)?;
        let is_musl = name.windows(7).any(|part| part == b"ld-musl");
        return Some(if is_musl { ProgramKind::Musl } else { ProgramKind::Loads });
    }
    if u16_at(&head, 16)? == ET_EXEC {
        return Some(ProgramKind::Static);
    }
    let is_pie = segment(file, &head, PT_DYNAMIC)?.is_some_and(|part| is_pie(file, part));
    Some(if is_pie { ProgramKind::Static } else { ProgramKind::Library })
}

/// The first segment of one kind: its offset in the file, and its bytes there.
fn segment(file: BorrowedFd<'_>, head: &[u8], wanted: u32) -> Option<Option<(u64, u64)>> {
    let table = u64_at(head, 32)?;
    let entry_bytes = u64::from(u16_at(head, 54)?);
    if entry_bytes < ENTRY_BYTES as u64 {
        return None;
    }
    for number in 0..u64::from(u16_at(head, 56)?) {
        let mut entry = [0u8; ENTRY_BYTES];
        read_exact(file, &mut entry, table.checked_add(number * entry_bytes)?)?;
        if u32_at(&entry, 0)? == wanted {
            return Some(Some((u64_at(&entry, 8)?, u64_at(&entry, 32)?)));
        }
    }
    Some(None)
}

/// True for the dynamic section of a program that may be at any address, not of a library.
fn is_pie(file: BorrowedFd<'_>, (at, bytes): (u64, u64)) -> bool {
    (0..(bytes / 16).min(MAX_DYNAMIC_ENTRIES)).any(|number| {
        let mut entry = [0u8; 16];
        let place = at.checked_add(number * 16);
        place.and_then(|place| read_exact(file, &mut entry, place)).is_some()
            && u64_at(&entry, 0) == Some(DT_FLAGS_1)
            && u64_at(&entry, 8).is_some_and(|flags| flags & DF_1_PIE != 0)
    })
}

fn read_exact(file: BorrowedFd<'_>, to: &mut [u8], at: u64) -> Option<()> {
    let mut done = 0;
    while done < to.len() {
        let from = at.checked_add(done as u64)?;
        match retry(|| rustix::io::pread(file, &mut to[done..], from)).ok()? {
            0 => return None,
            n => done += n,
        }
    }
    Some(())
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::vec::Vec;

    use rustix::fd::AsFd;

    use super::*;

    fn kind(bytes: &[u8]) -> Option<ProgramKind> {
        let path = std::env::temp_dir().join(std::format!(
            "swaptide-elf-{}-{:p}",
            std::process::id(),
            bytes.as_ptr()
        ));
        File::create(&path).and_then(|mut file| file.write_all(bytes)).expect("a file");
        let file = File::open(&path).expect("the file");
        std::fs::remove_file(&path).expect("it is removed");
        kind_of(file.as_fd())
    }

    /// The shell's file, with its interpreter's header made something else.
    fn shell(change: impl Fn(&mut [u8])) -> Vec<u8> {
        let mut bytes = std::fs::read("/bin/sh").expect("sh");
        let table = u64_at(&bytes, 32).expect("table") as usize;
        for number in 0..u16_at(&bytes, 56).expect("count") as usize {
            let entry = table + number * ENTRY_BYTES;
            if u32_at(&bytes, entry) == Some(PT_INTERP) {
                change(&mut bytes[entry..entry + ENTRY_BYTES]);
            }
        }
        bytes
    }

    #[test]
    fn programs_are_told_apart() {
        assert_eq!(kind(&shell(|_| ())), Some(ProgramKind::Loads));
        // It has no interpreter now, and is a program at any address.
        let without = shell(|entry| entry[0] = 0);
        assert_eq!(kind(&without), Some(ProgramKind::Static));
        let mut fixed = without.clone();
        fixed[16] = ET_EXEC as u8;
        assert_eq!(kind(&fixed), Some(ProgramKind::Static));
        let mut musl = shell(|_| ());
        let at = musl.windows(8).position(|part| part == b"ld-linux").expect("the loader's name");
        musl[at..at + 8].copy_from_slice(b"ld-musl-");
        assert_eq!(kind(&musl), Some(ProgramKind::Musl));
        let loader = std::fs::read("/lib64/ld-linux-x86-64.so.2").expect("the loader");
        assert_eq!(kind(&loader), Some(ProgramKind::Library));
    }

    #[test]
    fn what_is_no_program_has_no_kind() {
        let whole = shell(|_| ());
        assert_eq!(kind(b"#!/bin/sh\n"), None);
        assert_eq!(kind(&[]), None);
        assert_eq!(kind(&whole[..63]), None);
        assert_eq!(kind(&whole[..200]), None, "its headers are cut off");
        let mut foreign = whole;
        foreign[18] = 243;
        assert_eq!(kind(&foreign), None);
    }
}
