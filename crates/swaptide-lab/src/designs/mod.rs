//! The swap layers that are compared.
//!
//! | module    | what it owns |
//! |-----------|--------------|
//! | radix     | one radix tree: 64-way nodes, height grown lazily, one lock, look-ups without it |
//! | forest    | the swap cache made of such trees, in three shapes |
//! | map       | the static arrays: a byte of swap map and two of group for each slot |
//! | scanning  | the allocator that scans the map under the device's lock, free clusters only |
//! | clusters  | the allocator with cluster lists over the same static map |
//! | memory    | addresses for swap tables, and giving the memory of empty ones back to the system |
//! | layers    | a whole swap layer of each kind behind one interface |

#![deny(unsafe_code)]

pub(crate) mod clusters;
pub(crate) mod forest;
pub mod layers;
pub(crate) mod map;
mod memory;
mod radix;
pub(crate) mod scanning;
