//! The names by which a container is known where its numbers are looked at.
//!
//! Owns the variable that tells a run in a container which names it has, as what put the run into
//! the container knows them; the run tells its daemon.
//!
//! Locks: none.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Tells a run the names: `container=NAME pod=NAME namespace=NAME`, what there is of them.
const ENV_CONTAINER: &str = "SWAPTIDE_CONTAINER";
/// Where engines tell the names of a container, its pod and its namespace (containerd; CRI-O).
const ANNOTATIONS: [(&str, &str); 3] = [
    ("io.kubernetes.cri.container-name", "io.kubernetes.container.name"),
    ("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"),
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"),
];
/// Longest name: that of a pod.
const MAX_NAME_BYTES: usize = 253;

/// A container's names; empty where one is not known, as Prometheus has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerLabels {
    /// Its own name.
    pub container: String,
    /// That of its pod.
    pub pod: String,
    /// That of the pod's namespace.
    pub namespace: String,
}

impl ContainerLabels {
    /// Of the container that this process is in, if it was told.
    pub(crate) fn of_this_process() -> Option<ContainerLabels> {
        ContainerLabels::read(&std::env::var(ENV_CONTAINER).ok()?)
    }

    /// From the variable's value; words that mean nothing are left out.
    fn read(text: &str) -> Option<ContainerLabels> {
        let mut labels = ContainerLabels::default();
        for (key, value) in text.split_ascii_whitespace().filter_map(|word| word.split_once('=')) {
            let place = match key {
                "container" => &mut labels.container,
                "pod" => &mut labels.pod,
                "namespace" => &mut labels.namespace,
                _ => continue,
            };
            if value.len() <= MAX_NAME_BYTES && !value.contains(char::is_control) {
                value.clone_into(place);
            }
        }
        (!labels.container.is_empty()).then_some(labels)
    }

    /// From annotations; outside of pods its host's name, which engines make of its number.
    pub(crate) fn of_annotations(
        annotations: Option<&Map<String, Value>>,
        hostname: Option<&str>,
    ) -> ContainerLabels {
        let [container, pod, namespace] = ANNOTATIONS.map(|(one, other)| {
            let named = |key| annotations.and_then(|all| all.get(key)?.as_str());
            named(one).or_else(|| named(other)).unwrap_or_default().to_owned()
        });
        let container = Some(container).filter(|name| !name.is_empty());
        let container = container.or(hostname.map(str::to_owned)).unwrap_or_default();
        ContainerLabels { container, pod, namespace }
    }

    /// The variable and its value.
    pub(crate) fn variable(&self) -> String {
        let ContainerLabels { container, pod, namespace } = self;
        let names = [("container", container), ("pod", pod), ("namespace", namespace)];
        let known = names.into_iter().filter(|(_, name)| !name.is_empty());
        let words: Vec<String> = known.map(|(key, name)| format!("{key}={name}")).collect();
        format!("{ENV_CONTAINER}={}", words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_come_from_annotations_and_survive_the_variable() {
        let of = |annotations: Value| {
            ContainerLabels::of_annotations(annotations.as_object(), Some("d1d2e3f4"))
        };
        let containerd = of(json!({
            "io.kubernetes.cri.container-name": "web",
            "io.kubernetes.cri.sandbox-name": "front-5d9c",
            "io.kubernetes.cri.sandbox-namespace": "shop",
        }));
        let crio = of(json!({
            "io.kubernetes.container.name": "web",
            "io.kubernetes.pod.name": "front-5d9c",
            "io.kubernetes.pod.namespace": "shop",
        }));
        assert_eq!(containerd, crio);
        let line = "SWAPTIDE_CONTAINER=container=web pod=front-5d9c namespace=shop";
        assert_eq!(crio.variable(), line);
        let (_, value) = line.split_once('=').expect("a variable");
        assert_eq!(ContainerLabels::read(value), Some(crio));
        assert_eq!(of(json!({})).variable(), "SWAPTIDE_CONTAINER=container=d1d2e3f4");
    }

    #[test]
    fn words_of_a_value_that_make_no_sense_are_left_out() {
        assert_eq!(ContainerLabels::read(""), None);
        assert_eq!(ContainerLabels::read("pod=a namespace=b"), None, "no container");
        let long = format!("container=x pod={} other=y z", "p".repeat(254));
        let labels = ContainerLabels::read(&long).expect("a container");
        assert_eq!((labels.container.as_str(), labels.pod.as_str()), ("x", ""));
    }
}
