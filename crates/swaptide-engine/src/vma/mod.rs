//! The program's mappings: which are managed, and what the program does to them.

pub mod adopt;
mod elf_bss;
pub(crate) mod fork_advice;
pub(crate) mod madvise;
mod unmovable;
