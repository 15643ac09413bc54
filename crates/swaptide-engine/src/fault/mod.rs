//! The way in: from a fault to the page in its place.

pub(crate) mod direct_reclaim;
pub(crate) mod guards;
pub(crate) mod load;
pub mod path;
pub(crate) mod remote;
