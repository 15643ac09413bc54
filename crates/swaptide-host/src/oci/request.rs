//! What the annotations of a container ask for.
//!
//! Owns their names: `swaptide.ram`, `swaptide.swap`, `swaptide.group`. A pod's annotations reach
//! all of its containers; `swaptide.ram/NAME` is for the container NAME alone, and counts more
//! there. What an engine starts to hold a pod together asks for nothing.

use serde_json::{Map, Value};
use swaptide_ipc::MIN_BUDGET_BYTES;

use crate::cgroup::tree::GroupPath;
use crate::oci::error::OciError;
use crate::oci::quantity::parse_quantity;
use crate::swap::spec;

const PREFIX: &str = "swaptide.";
/// In an environment.
const ENV_PREFIX: &str = "SWAPTIDE_";
const NAMES: [&str; 3] = ["ram", "swap", "group"];
/// Those that an environment may have. An image can set it, so what gives it the host's daemon is
/// not among them.
const ENV_NAMES: [&str; 2] = ["ram", "swap"];
/// Where engines tell the name of a container in its pod.
const CONTAINER_NAMES: [&str; 2] =
    ["io.kubernetes.cri.container-name", "io.kubernetes.container.name"];
/// Where engines tell whether it is a pod's own container, which has no program of the user's.
const CONTAINER_TYPES: [&str; 2] =
    ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"];

/// What a container asks for, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContainerRequest {
    /// The annotation that says the budget, and its value.
    pub(super) said: (String, String),
    /// The budget in bytes.
    pub(super) ram: u64,
    /// Swap areas, as `--swap` takes them.
    pub(super) swap: Vec<String>,
    /// The group of the host's daemon.
    pub(super) group: Option<GroupPath>,
}

/// A name without prefix, the annotation that has it, and its value.
type Found<'a> = (&'static str, String, &'a str);

impl ContainerRequest {
    /// What the annotations ask for; `None` if nothing. `environment`: variables of the container
    /// that count as annotations do.
    ///
    /// # Errors
    /// The first mistake.
    pub(super) fn of(
        annotations: &Map<String, Value>,
        environment: &[&str],
    ) -> Result<Option<ContainerRequest>, OciError> {
        let one = |names: [&str; 2]| names.into_iter().find_map(|name| annotations.get(name));
        if one(CONTAINER_TYPES).and_then(Value::as_str) == Some("sandbox") {
            return Ok(None);
        }
        let container = one(CONTAINER_NAMES).and_then(Value::as_str);
        // What is found later counts more.
        let mut found: Vec<Found<'_>> = Vec::new();
        for name in ENV_NAMES {
            let variable = format!("{ENV_PREFIX}{}", name.to_ascii_uppercase());
            let value = environment
                .iter()
                .filter_map(|line| line.split_once('='))
                .rfind(|(key, _)| *key == variable);
            found.extend(value.map(|(_, value)| (name, variable, value)));
        }
        for of_one in [false, true] {
            for (key, value) in annotations {
                let Some(rest) = key.strip_prefix(PREFIX) else { continue };
                let (name, of) = rest.split_once('/').map_or((rest, None), |(n, of)| (n, Some(of)));
                let known = NAMES.into_iter().find(|known| *known == name);
                let name = known.ok_or_else(|| OciError::Unknown(key.clone()))?;
                if of.is_some() == of_one && (of.is_none() || of == container) {
                    let text = value.as_str().ok_or_else(|| OciError::NoText(key.clone()))?;
                    found.push((name, key.clone(), text));
                }
            }
        }
        ContainerRequest::read(&found)
    }

    fn read(found: &[Found<'_>]) -> Result<Option<ContainerRequest>, OciError> {
        let last = |wanted: &str| found.iter().rfind(|(name, _, _)| *name == wanted);
        let Some((_, key, text)) = last("ram") else {
            // The rest alone would be of no effect, and not what was meant.
            return match found.first() {
                Some((_, key, _)) => Err(OciError::NoBudget(key.clone())),
                None => Ok(None),
            };
        };
        let ram = parse_quantity(text).map_err(|error| OciError::Quantity(key.clone(), error))?;
        let said = (key.clone(), (*text).to_owned());
        if ram < MIN_BUDGET_BYTES {
            return Err(OciError::Small(said.0, said.1));
        }
        let mut swap = Vec::new();
        if let Some((_, key, text)) = last("swap") {
            // A blank is in no name of an area, and a comma is in most of their options.
            swap = text.split_ascii_whitespace().map(str::to_owned).collect();
            let wrong = |why: String| OciError::Value(key.clone(), why);
            if swap.is_empty() {
                return Err(wrong("names no swap area; write it like zram:128M".into()));
            }
            for area in &swap {
                spec::parse(area).map_err(|error| wrong(error.to_string()))?;
            }
        }
        let group = last("group").map(|(_, key, text)| {
            GroupPath::parse(text).map_err(|error| OciError::Value(key.clone(), error.to_string()))
        });
        let group = group.transpose()?;
        match (&group, last("swap")) {
            (Some(_), Some((_, key, _))) => {
                Err(OciError::Value(key.clone(), "the daemon of swaptide.group has its own".into()))
            }
            _ => Ok(Some(ContainerRequest { said, ram, swap, group })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(annotations: Value) -> Result<Option<ContainerRequest>, String> {
        let Value::Object(map) = annotations else { panic!("an object") };
        ContainerRequest::of(&map, &[]).map_err(|error| error.to_string())
    }

    fn ram(annotations: Value) -> Option<u64> {
        of(annotations).expect("sound").map(|request| request.ram)
    }

    #[test]
    fn only_annotations_of_swaptide_ask_for_something() {
        assert_eq!(of(json!({})), Ok(None));
        assert_eq!(of(json!({"io.container.manager": "libpod", "swaptide": "1Gi"})), Ok(None));
        assert_eq!(ram(json!({"swaptide.ram": "256Mi"})), Some(256 << 20));
        let whole =
            of(json!({"swaptide.ram": "1Gi", "swaptide.swap": "zram:64M file:/var/tmp:1G"}));
        let whole = whole.expect("sound").expect("a request");
        assert_eq!(whole.swap, ["zram:64M", "file:/var/tmp:1G"]);
        let group = of(json!({"swaptide.ram": "1Gi", "swaptide.group": "/web/front"}));
        let group = group.expect("sound").expect("a request").group.expect("a group");
        assert_eq!(group.as_str(), "/web/front");
    }

    #[test]
    fn a_mistake_is_one_line_that_names_the_annotation() {
        for (annotations, parts) in [
            (json!({"swaptide.ram": "lots"}), ["swaptide.ram", "\"lots\""]),
            (json!({"swaptide.ram": ""}), ["swaptide.ram", "256Mi"]),
            (json!({"swaptide.ram": "256m"}), ["swaptide.ram", "thousandths"]),
            (json!({"swaptide.ram": "1Mi"}), ["swaptide.ram", "16M"]),
            (json!({"swaptide.ram": "0"}), ["swaptide.ram", "16M"]),
            (json!({"swaptide.ram": 5}), ["swaptide.ram", "text"]),
            (json!({"swaptide.rma": "256Mi"}), ["swaptide.rma", "swaptide.group"]),
            (json!({"swaptide.group": "/web"}), ["swaptide.group", "swaptide.ram"]),
            (json!({"swaptide.ram": "1Gi", "swaptide.group": "web"}), ["swaptide.group", "web"]),
            (json!({"swaptide.ram": "1Gi", "swaptide.swap": "tape:1"}), ["swaptide.swap", "tape"]),
            (json!({"swaptide.ram": "1Gi", "swaptide.swap": " "}), ["swaptide.swap", "zram:128M"]),
            (
                json!({"swaptide.ram": "1Gi", "swaptide.swap": "zram:1G", "swaptide.group": "/a"}),
                ["swaptide.swap", "daemon"],
            ),
        ] {
            let error = of(annotations.clone()).expect_err("a mistake");
            assert!(parts.iter().all(|part| error.contains(part)), "{annotations}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn what_names_a_container_is_for_that_one() {
        let pod = |name: &str| {
            json!({
                "swaptide.ram": "1Gi", "swaptide.ram/small": "64Mi",
                "io.kubernetes.cri.container-name": name,
            })
        };
        assert_eq!(ram(pod("small")), Some(64 << 20));
        assert_eq!(ram(pod("other")), Some(1 << 30));
        assert_eq!(ram(json!({"swaptide.ram/small": "64Mi"})), None, "no name is told");
        let named = json!({"swaptide.ram/a": "64Mi", "io.kubernetes.container.name": "a"});
        assert_eq!(ram(named), Some(64 << 20));
        for key in CONTAINER_TYPES {
            let sandbox = json!({"swaptide.ram": "1Gi", key: "sandbox"});
            assert_eq!(ram(sandbox), None, "a pod's own container");
            assert_eq!(ram(json!({"swaptide.ram": "1Gi", key: "container"})), Some(1 << 30));
        }
    }

    #[test]
    fn variables_count_where_they_are_asked_for_and_less_than_annotations() {
        let of = |annotations: Value, environment: &[&str]| {
            let Value::Object(map) = annotations else { panic!("an object") };
            let request = ContainerRequest::of(&map, environment).expect("sound");
            assert!(request.iter().all(|request| request.group.is_none()), "an image's own");
            request.map(|request| request.ram)
        };
        let lines = ["PATH=/bin", "SWAPTIDE_RAM=64Mi", "SWAPTIDE_RAM=128Mi", "SWAPTIDE_GROUP=/a"];
        assert_eq!(of(json!({}), &lines), Some(128 << 20), "as a program finds it");
        assert_eq!(of(json!({"swaptide.ram": "1Gi"}), &lines), Some(1 << 30));
        assert_eq!(of(json!({}), &[]), None);
    }
}
