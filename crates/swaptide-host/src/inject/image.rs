//! The agent's library as it is put into a program that does not load it: its segments, and what
//! of them depends on the place.
//!
//! Owns what was read of the file. Locks: none.
//!
//! What the library needs of libc is bound to its own stand-ins ([`swaptide_ipc::injected`]); what
//! may be absent (weak symbols) is null.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use object::elf::{
    FileHeader64, PF_W, PF_X, PT_LOAD, PT_TLS, R_X86_64_64, R_X86_64_DTPMOD64, R_X86_64_DTPOFF64,
    R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT, R_X86_64_RELATIVE, SHT_DYNSYM, SHT_RELR, STB_WEAK,
};
use object::read::elf::{
    FileHeader, ProgramHeader, Rela, SectionHeader, SectionTable, Sym, SymbolTable,
};
use object::{Endianness, ReadCache};
use swaptide_ipc::injected::{MISSING, STAND_IN, START, TLS_BYTES};
use swaptide_sys::PAGE_SIZE;
use thiserror::Error;

type Elf = FileHeader64<Endianness>;
type FileBytes<'a> = &'a ReadCache<File>;

/// Why the library cannot be put into a program.
#[derive(Debug, Error)]
pub enum ImageError {
    /// It cannot be read.
    #[error("{path}: {1}", path = .0.display())]
    Read(PathBuf, io::Error),
    /// It is not what this swaptide was built with.
    #[error("{path}: {1}; install swaptide again", path = .0.display())]
    Unfit(PathBuf, String),
}

impl ImageError {
    /// True where descriptors or memory are short: later it may be read.
    pub(super) fn may_pass(&self) -> bool {
        const SHORT: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN];
        let number = match self {
            ImageError::Read(_, error) => error.raw_os_error(),
            ImageError::Unfit(..) => None,
        };
        number.is_some_and(|number| SHORT.contains(&number))
    }
}

/// A part of the library.
pub(super) struct LibraryPart {
    /// Offset of its first byte from the library's base.
    pub start: u64,
    /// Bytes in memory; those past the file's are zero.
    pub len: u64,
    /// Offset of its first byte in the file.
    pub offset: u64,
    pub is_written: bool,
    pub is_executed: bool,
    /// Bytes that the file has of it.
    file_len: u64,
}

impl LibraryPart {
    /// Its whole pages: offset from the base, and bytes.
    pub(super) fn pages(&self) -> (u64, u64) {
        let start = self.start / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        (start, (self.start + self.len).next_multiple_of(PAGE_SIZE as u64) - start)
    }

    /// What the file has of it, for a library at `base`.
    ///
    /// # Errors
    /// When it cannot be read, or has become shorter.
    pub(super) fn bytes_at(&self, image: &AgentImage, base: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.file_len as usize];
        image.file.read_exact_at(&mut bytes, self.offset)?;
        for word in &image.words {
            let Some(at) = word.place.checked_sub(self.start).map(|at| at as usize) else {
                continue;
            };
            if let Some(place) = bytes.get_mut(at..at + 8) {
                let value = if word.is_based { base + word.value } else { word.value };
                place.copy_from_slice(&value.to_le_bytes());
            }
        }
        Ok(bytes)
    }
}

/// A word that is set when the place of the library is known.
struct RelocatedWord {
    /// Offset from the base.
    place: u64,
    value: u64,
    /// The base is added.
    is_based: bool,
}

/// The library's file, which is read when the first program needs it.
pub(crate) struct AgentFile {
    path: PathBuf,
    image: Option<AgentImage>,
}

impl AgentFile {
    /// The library at a path. It is read now if it `is_needed`.
    ///
    /// # Errors
    /// As for [`AgentFile::read`].
    pub(crate) fn new(path: PathBuf, is_needed: bool) -> Result<AgentFile, ImageError> {
        let mut file = AgentFile { path, image: None };
        if is_needed {
            file.read()?;
        }
        Ok(file)
    }

    /// Reads it, if it was not.
    ///
    /// # Errors
    /// When it cannot be read, or has what only a loader could provide.
    pub(super) fn read(&mut self) -> Result<(), ImageError> {
        if self.image.is_none() {
            self.image = Some(AgentImage::read(&self.path)?);
        }
        Ok(())
    }

    /// What was read of it.
    pub(super) fn image(&self) -> Option<&AgentImage> {
        self.image.as_ref()
    }
}

/// The library.
pub(super) struct AgentImage {
    pub path: PathBuf,
    file: File,
    /// Device and inode of the file.
    pub identity: (u64, u64),
    pub parts: Vec<LibraryPart>,
    words: Vec<RelocatedWord>,
    /// Offset of the first thread's code.
    pub start: u64,
    /// Bytes from the base to the end, in whole pages.
    pub span: u64,
}

impl AgentImage {
    /// Reads the library.
    ///
    /// # Errors
    /// When it cannot be read, or has what only a loader could provide.
    fn read(path: &Path) -> Result<AgentImage, ImageError> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = opened.map_err(|error| ImageError::Read(path.into(), error))?;
        let copy = file.try_clone().map_err(|error| ImageError::Read(path.into(), error))?;
        let identity = (metadata.dev(), metadata.ino());
        AgentImage::of(path, file, &ReadCache::new(copy), identity)
            .map_err(|why| ImageError::Unfit(path.to_owned(), why))
    }

    fn of(
        path: &Path,
        file: File,
        bytes: &ReadCache<File>,
        identity: (u64, u64),
    ) -> Result<AgentImage, String> {
        let failed = |error: object::Error| error.to_string();
        let header = Elf::parse(bytes).map_err(failed)?;
        let endian = header.endian().map_err(failed)?;
        let mut parts = Vec::new();
        for header in header.program_headers(endian, bytes).map_err(failed)? {
            let len = header.p_memsz(endian);
            match header.p_type(endian) {
                PT_TLS if len > TLS_BYTES as u64 => {
                    return Err(format!("{len} bytes of thread-local variables"));
                }
                PT_LOAD => {
                    parts.push(LibraryPart {
                        start: header.p_vaddr(endian),
                        len,
                        offset: header.p_offset(endian),
                        is_written: header.p_flags(endian) & PF_W != 0,
                        is_executed: header.p_flags(endian) & PF_X != 0,
                        file_len: header.p_filesz(endian),
                    });
                }
                _ => {}
            }
        }
        let pages_end = |segment: &LibraryPart| segment.pages().0 + segment.pages().1;
        let span = parts.iter().map(pages_end).max().ok_or("it has no segments")?;
        // Its other symbols are for debuggers, many, and not read.
        let sections = header.sections(endian, bytes).map_err(failed)?;
        let table = sections.symbols(endian, bytes, SHT_DYNSYM).map_err(failed)?;
        let symbols = Symbols::of(endian, &table);
        let start = symbols.defined(START).ok_or_else(|| format!("it has no {START}"))?;
        let words = words_of(endian, bytes, &sections, &symbols)?;
        Ok(AgentImage { path: path.to_owned(), file, identity, parts, words, start, span })
    }
}

/// The library's dynamic symbols.
struct Symbols<'a> {
    endian: Endianness,
    table: &'a SymbolTable<'a, Elf, FileBytes<'a>>,
    defined: HashMap<&'a [u8], u64>,
}

impl<'a> Symbols<'a> {
    fn of(endian: Endianness, table: &'a SymbolTable<'a, Elf, FileBytes<'a>>) -> Symbols<'a> {
        let defined =
            table.iter().filter(|symbol| symbol.is_definition(endian)).filter_map(|symbol| {
                let name = symbol.name(endian, table.strings()).ok()?;
                Some((name, symbol.st_value(endian)))
            });
        Symbols { endian, table, defined: defined.collect() }
    }

    fn defined(&self, name: &str) -> Option<u64> {
        self.defined.get(name.as_bytes()).copied()
    }

    /// Where a name that the library needs is found; `None`: nowhere, and it may be absent.
    fn resolve(&self, name: &str, is_weak: bool) -> Result<Option<u64>, String> {
        let stand_in = match name {
            "mmap64" => "mmap",
            "dladdr" | "getenv" => "dlsym",
            name => name,
        };
        // Before the hook that the library may have under that name.
        let found = self.defined(&format!("{STAND_IN}{stand_in}")).or_else(|| self.defined(name));
        match found {
            None if is_weak => Ok(None),
            None => self.defined(MISSING).map(Some).ok_or_else(|| format!("it has no {MISSING}")),
            found => Ok(found),
        }
    }

    fn word(&self, entry: &impl Rela<Endian = Endianness>) -> Result<RelocatedWord, String> {
        let endian = self.endian;
        let place: u64 = entry.r_offset(endian).into();
        let addend: i64 = entry.r_addend(endian).into();
        let addend = addend as u64;
        let symbol = entry
            .symbol(endian, false)
            .map(|index| self.table.symbol(index))
            .transpose()
            .map_err(|error| error.to_string())?;
        let kind = entry.r_type(endian, false);
        match (kind, symbol) {
            (R_X86_64_RELATIVE, _) => Ok(RelocatedWord { place, value: addend, is_based: true }),
            // There is one module.
            (R_X86_64_DTPMOD64, _) => Ok(RelocatedWord { place, value: 1, is_based: false }),
            (R_X86_64_DTPOFF64, symbol) => {
                let at = symbol.map_or(0, |symbol| symbol.st_value(endian));
                Ok(RelocatedWord { place, value: at.wrapping_add(addend), is_based: false })
            }
            (R_X86_64_GLOB_DAT | R_X86_64_JUMP_SLOT | R_X86_64_64, Some(symbol)) => {
                let name = symbol.name(endian, self.table.strings());
                let name = name.map_err(|error| error.to_string())?;
                let name = std::str::from_utf8(name).map_err(|error| error.to_string())?;
                let found = self.resolve(name, symbol.st_bind() == STB_WEAK)?;
                let value = found.map_or(0, |at| at.wrapping_add(addend));
                Ok(RelocatedWord { place, value, is_based: found.is_some() })
            }
            (other, _) => Err(format!("it has relocations of kind {other}")),
        }
    }
}

/// The words that depend on the library's place, and those that name symbols.
fn words_of<'a>(
    endian: Endianness,
    bytes: FileBytes<'a>,
    sections: &SectionTable<'a, Elf, FileBytes<'a>>,
    symbols: &Symbols<'_>,
) -> Result<Vec<RelocatedWord>, String> {
    let mut words = Vec::new();
    for section in sections.iter() {
        if section.sh_type(endian) == SHT_RELR {
            return Err("it has packed relocations (.relr.dyn)".into());
        }
        let list = section.rela(endian, bytes).map_err(|error| error.to_string())?;
        let list = list.filter(|(_, of)| *of == symbols.table.section());
        for entry in list.into_iter().flat_map(|(list, _)| list) {
            words.push(symbols.word(entry)?);
        }
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_agent_is_refused() {
        let refused = |path: &str| AgentImage::read(Path::new(path)).err().map(|e| e.to_string());
        assert!(refused("/no/such/library.so").expect("an error").contains("No such file"));
        let shell = refused("/bin/sh").expect("an error");
        assert!(shell.contains(START) && shell.contains("install swaptide again"), "{shell}");
        assert!(refused("/etc/passwd").is_some());
    }

    #[test]
    fn words_are_set_for_the_place() {
        let file = File::open("/bin/sh").expect("sh");
        let mut expected = [0u8; 64];
        file.read_exact_at(&mut expected, 0).expect("its first bytes");
        let segment = LibraryPart {
            start: 0x1010,
            len: 200,
            offset: 0,
            is_written: true,
            is_executed: false,
            file_len: 64,
        };
        assert_eq!(segment.pages(), (0x1000, 0x1000));
        let word = |place, value, is_based| RelocatedWord { place, value, is_based };
        let image = AgentImage {
            path: "/bin/sh".into(),
            file,
            identity: (0, 0),
            parts: Vec::new(),
            // One before the segment, one behind what the file has of it.
            words: vec![
                word(0x1018, 5, true),
                word(0x1020, 7, false),
                word(0x1008, 9, true),
                word(0x104c, 9, true),
            ],
            start: 0,
            span: 0x2000,
        };
        expected[8..16].copy_from_slice(&0x70_0005u64.to_le_bytes());
        expected[16..24].copy_from_slice(&7u64.to_le_bytes());
        assert_eq!(segment.bytes_at(&image, 0x70_0000).expect("bytes"), expected);
    }
}
