//! Containers whose engine is told by an annotation that they run under a budget, with an image
//! that knows nothing of it.
//!
//! Owns what changes in a container's `config.json` (OCI runtime specification), and the two places
//! where it is changed: in front of the runtime (`swaptide oci-runtime`, which every engine can be
//! given), and as a hook of podman's before it starts one (`swaptide oci-hook`).
//!
//! | module | owns |
//! |---|---|
//! | `quantity` | sizes as Kubernetes reads them |
//! | `request` | the annotations, and what they ask for |
//! | `container` | the `config.json`, and its change |
//! | `parts` | what the host gives: command, agent, device, daemon |
//! | [`runtime`] | the command line of a runtime, and the hook |
//!
//! Invariants
//! 1. Without an annotation of swaptide's nothing is changed, byte for byte.
//! 2. What this does not know of a `config.json` stays as it is.
//! 3. A mistake in an annotation fails the creation: no container runs without the budget that it
//!    asks for.
//!
//! Locks: none.

mod container;
mod error;
mod parts;
mod quantity;
mod request;
pub mod runtime;

pub use self::error::OciError;
