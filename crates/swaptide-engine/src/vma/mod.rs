//! The program's mappings: which are managed, and what the program does to them.

pub mod adopt;
pub mod dontfork;
pub(crate) mod elf_bss;
pub mod events;
pub(crate) mod madvise;
pub mod small;
pub(crate) mod unarmed;
pub(crate) mod unmovable;
