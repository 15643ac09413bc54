//! The program's mappings: which are managed, and what the program does to them.

pub mod adopt;
pub(crate) mod apart;
mod elf_bss;
pub(crate) mod madvise;
mod unmovable;
