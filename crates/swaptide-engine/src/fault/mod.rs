//! The way in: from a fault to the page in its place.

pub(crate) mod complete;
mod direct_reclaim;
pub(crate) mod install;
pub(crate) mod load;
pub(crate) mod loading;
pub(crate) mod path;
mod placing;
pub(crate) mod remote;
pub(crate) mod swap_in;
