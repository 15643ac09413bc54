//! What processes and users ask of a supervisor: the socket of a run's processes, the socket of its
//! owner, and the forks that the supervisor follows.

pub mod agent_api;
pub mod client;
pub(crate) mod daemon_client;
pub(crate) mod filter_client;
pub(crate) mod filter_offers;
pub mod fork_tracer;
pub(crate) mod holds;
mod orphans;
pub mod peer;
pub mod server;
pub(crate) mod trust;
pub mod watch;

use swaptide_sys::uffd::Features;

/// The features that the engine asks of a userfaultfd if it may.
pub(crate) const REQUIRED: Features = WITHOUT_FORK.union(Features::EVENT_FORK);
/// The same without what needs a capability.
pub(crate) const WITHOUT_FORK: Features = Features::MOVE
    .union(Features::POISON)
    .union(Features::THREAD_ID)
    .union(Features::EVENT_REMAP)
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP);

/// Whose processes are helped to a userfaultfd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Users {
    /// All of the run, those that have dropped their privileges among them.
    #[default]
    All,
    /// Those of the supervisor's user alone.
    SameUser,
}

impl std::str::FromStr for Users {
    type Err = String;

    fn from_str(text: &str) -> Result<Users, String> {
        match text {
            "all" => Ok(Users::All),
            "same-user" => Ok(Users::SameUser),
            _ => Err(format!("{text:?}: expected all or same-user")),
        }
    }
}
