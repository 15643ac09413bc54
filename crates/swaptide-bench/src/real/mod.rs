//! Real programs, for `bench real`.
//!
//! | module | owns |
//! |--------|------|
//! | programs | which programs there are, their texts and inputs |
//! | place | a directory in which all they need is installed, made once and kept |
//! | run | one run of a program: without a limit, under the kernel's swap, under swaptide |

pub(crate) mod place;
pub(crate) mod programs;
pub(crate) mod run;
