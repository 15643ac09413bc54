//! A container's `config.json`, and what of it changes.
//!
//! Added are: the command and the agent, mounted read-only below [`PLACE`]; the device, with a rule
//! of the device cgroup; and `swaptide run` in front of the program. The program runs with the
//! users, rights, filters and limits that the container has; its memory limit stays.
//!
//! Invariants
//! 1. A container that is changed twice is what it is when changed once.
//! 2. An engine's init stays the first process, and `swaptide run` comes behind it.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::container_labels::ContainerLabels;
use crate::oci::error::OciError;
use crate::oci::parts::{DEVICE, HostParts};
use crate::oci::request::ContainerRequest;

/// Where the parts are in a container. Engines keep their own mark in `/run` likewise.
const PLACE: &str = "/run/.swaptide";
/// Programs that start the container's own after `--`, and reap what it leaves.
const INITS: [&str; 6] =
    ["docker-init", "podman-init", "tini", "tini-static", "catatonit", "dumb-init"];
/// Options of theirs whose value is the next word: tini's and dumb-init's.
const INIT_OPTIONS_WITH_VALUE: [&str; 4] = ["-p", "-e", "-r", "--rewrite"];
/// Where a run makes its swap file, of those that containers have.
const SWAP_PLACES: [&str; 2] = ["/var/tmp", "/tmp"];

#[cfg(test)]
mod tests;

type JsonMap = Map<String, Value>;

/// A `config.json`.
pub(super) struct Container(JsonMap);

impl Container {
    /// Reads a file's text.
    ///
    /// # Errors
    /// That it is none.
    pub(super) fn read(text: &[u8]) -> Result<Container, OciError> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(config)) => Ok(Container(config)),
            Ok(_) => Err(OciError::Config("not an object".into())),
            Err(error) => Err(OciError::Config(error.to_string())),
        }
    }

    /// The text of a file.
    pub(super) fn text(self) -> Vec<u8> {
        Value::Object(self.0).to_string().into_bytes()
    }

    /// What it asks for. `reads_environment`: its variables count as annotations do.
    ///
    /// # Errors
    /// The first mistake.
    pub(super) fn request(
        &self,
        reads_environment: bool,
    ) -> Result<Option<ContainerRequest>, OciError> {
        let none = JsonMap::new();
        let annotations = self.0.get("annotations").and_then(Value::as_object);
        let environment = self.0.get("process").and_then(|process| process.get("env"));
        let environment = environment.and_then(Value::as_array).filter(|_| reads_environment);
        let lines: Vec<&str> =
            environment.into_iter().flatten().filter_map(Value::as_str).collect();
        ContainerRequest::of(annotations.unwrap_or(&none), &lines)
    }

    /// Changes it; false if that has been done before. `bundle`: what a relative root is below.
    ///
    /// # Errors
    /// Why it cannot have what it asks for; nothing has changed then.
    pub(super) fn put_under(
        &mut self,
        request: &ContainerRequest,
        parts: &HostParts,
        bundle: &Path,
    ) -> Result<bool, OciError> {
        let words = self.arguments()?;
        let command = format!("{PLACE}/swaptide");
        let at = behind_init(&words);
        if words.get(at..at + 2) == Some(&[command.as_str(), "run"]) && self.has_mount(&command) {
            return Ok(false);
        }
        self.check_limit(request)?;
        let sockets = match &request.group {
            Some(_) => Some(self.check_group(parts)?),
            None => None,
        };
        let mut run = vec![command, "run".to_owned(), "--ram".to_owned(), request.ram.to_string()];
        match &request.group {
            Some(group) => {
                run.extend(["--need-daemon".to_owned(), "--group".to_owned(), group.to_string()]);
            }
            None => run.push("--no-daemon".to_owned()),
        }
        let swap = match request.swap.is_empty() && request.group.is_none() {
            // In memory is all that there is.
            true if !self.has_swap_place(bundle) => vec![format!("zram:{}", request.ram)],
            _ => request.swap.clone(),
        };
        run.extend(swap.into_iter().flat_map(|area| ["--swap".to_owned(), area]));
        run.push("--".to_owned());
        let user = self.user();
        let labels = self.labels();
        self.mount(parts, sockets)?;
        self.give_device(parts.device, user)?;
        let process = object(&mut self.0, "process")?;
        array(process, "args")?.splice(at..at, run.into_iter().map(Value::String));
        if sockets.is_some() {
            let line = format!("SWAPTIDE_DIRECTORY={PLACE}/sockets");
            array(process, "env")?.extend([line, labels.variable()].map(Value::String));
        }
        Ok(true)
    }

    /// True if something is mounted there.
    fn has_mount(&self, place: &str) -> bool {
        let mounts = self.0.get("mounts").and_then(Value::as_array);
        mounts.into_iter().flatten().any(|mount| mount.get("destination") == Some(&json!(place)))
    }

    fn labels(&self) -> ContainerLabels {
        let annotations = self.0.get("annotations").and_then(Value::as_object);
        ContainerLabels::of_annotations(annotations, self.0.get("hostname").and_then(Value::as_str))
    }

    fn arguments(&self) -> Result<Vec<&str>, OciError> {
        let words = self.0.get("process").and_then(|process| process.get("args"));
        let words = words.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let texts: Option<Vec<&str>> = words.iter().map(Value::as_str).collect();
        texts.filter(|texts| !texts.is_empty()).ok_or_else(|| {
            OciError::Config("process.args names no program to run under a budget".into())
        })
    }

    /// The kernel would end it before it is at its budget.
    fn check_limit(&self, request: &ContainerRequest) -> Result<(), OciError> {
        let limit =
            self.linux().and_then(|linux| linux.get("resources")?.get("memory")?.get("limit"));
        match limit.and_then(Value::as_u64) {
            Some(limit) if limit < request.ram => {
                let (key, text) = request.said.clone();
                Err(OciError::AboveLimit(key, text, limit))
            }
            _ => Ok(()),
        }
    }

    /// The directory of the daemon's socket, if that daemon can keep the container.
    fn check_group<'a>(&self, parts: &'a HostParts) -> Result<&'a Path, OciError> {
        if self.has_own_namespace("pid") {
            let why = "the container has a pid namespace of its own, in which the host's daemon \
                and its processes mean different ones by a number; start it in the host's \
                (--pid=host, hostPID)";
            return Err(OciError::Group(why.into()));
        }
        if self.has_own_namespace("user") || self.user().0 != 0 {
            let why = "only the daemon's user, root, may join it, and the container is another's";
            return Err(OciError::Group(why.into()));
        }
        parts.sockets.as_deref().ok_or_else(|| {
            OciError::Group("no daemon listens; start one with swaptide daemon".into())
        })
    }

    fn linux(&self) -> Option<&JsonMap> {
        self.0.get("linux").and_then(Value::as_object)
    }

    fn user(&self) -> (u64, u64) {
        let user = self.0.get("process").and_then(|process| process.get("user"));
        let number = |name| user.and_then(|user| user.get(name)?.as_u64()).unwrap_or(0);
        (number("uid"), number("gid"))
    }

    fn has_own_namespace(&self, kind: &str) -> bool {
        let all = self.linux().and_then(|linux| linux.get("namespaces")?.as_array());
        let mut kinds = all.into_iter().flatten().filter_map(|one| one.get("type")?.as_str());
        kinds.any(|found| found == kind)
    }

    /// True if there is a directory for a swap file that is no memory and that can be written.
    fn has_swap_place(&self, bundle: &Path) -> bool {
        let mounts = self.0.get("mounts").and_then(Value::as_array);
        let root = self.0.get("root");
        let is_readonly = root.and_then(|root| root.get("readonly")?.as_bool()) == Some(true);
        let path = root.and_then(|root| root.get("path")?.as_str()).unwrap_or("rootfs");
        SWAP_PLACES.into_iter().any(|place| {
            let is_here =
                |mount: &&Value| mount.get("destination").and_then(Value::as_str) == Some(place);
            match mounts.and_then(|mounts| mounts.iter().rfind(is_here)) {
                Some(mount) => {
                    let options = mount.get("options").and_then(Value::as_array);
                    let mut options = options.into_iter().flatten();
                    let is_in_memory = mount.get("type").and_then(Value::as_str) == Some("tmpfs");
                    !is_in_memory && !options.any(|option| option == "ro")
                }
                // A link in the root could lead anywhere.
                None => {
                    let here = bundle.join(path).join(&place[1..]);
                    !is_readonly && here.symlink_metadata().is_ok_and(|found| found.is_dir())
                }
            }
        })
    }

    fn mount(&mut self, parts: &HostParts, sockets: Option<&Path>) -> Result<(), OciError> {
        let files = [
            ("swaptide", Some(parts.command.as_path())),
            (crate::run::error::AGENT_NAME, Some(parts.agent.as_path())),
            ("sockets", sockets),
        ];
        let mounts = array(&mut self.0, "mounts")?;
        for (name, source) in files.into_iter().filter_map(|(name, from)| Some((name, from?))) {
            let source = source.to_str().ok_or_else(|| {
                OciError::Host(format!("{}: a path that is not UTF-8", source.display()))
            })?;
            mounts.push(json!({
                "destination": format!("{PLACE}/{name}"),
                "type": "bind",
                "source": source,
                "options": ["bind", "ro", "nosuid", "nodev"],
            }));
        }
        Ok(())
    }

    /// The device for the container's user, unless it has that already.
    fn give_device(
        &mut self,
        (major, minor): (u32, u32),
        (uid, gid): (u64, u64),
    ) -> Result<(), OciError> {
        let linux = object(&mut self.0, "linux")?;
        let devices = array(linux, "devices")?;
        let is_it = |device: &Value| device.get("path").and_then(Value::as_str) == Some(DEVICE);
        if !devices.iter().any(is_it) {
            devices.push(json!({
                "path": DEVICE, "type": "c", "major": major, "minor": minor,
                "fileMode": 0o600, "uid": uid, "gid": gid,
            }));
        }
        // Where there are no rules, as without root, none denies it.
        let has_rules = linux.get("resources").is_some_and(|all| all.get("devices").is_some());
        if has_rules {
            array(object(linux, "resources")?, "devices")?.push(json!({
                "allow": true, "type": "c", "major": major, "minor": minor, "access": "rw",
            }));
        }
        Ok(())
    }
}

/// Where `swaptide run` goes: behind an init that starts the program after `--`, else in front. A
/// `--` behind a word that is no option is the program's own.
fn behind_init(words: &[&str]) -> usize {
    let name = Path::new(words[0]).file_name().and_then(|name| name.to_str());
    if !name.is_some_and(|name| INITS.contains(&name)) {
        return 0;
    }
    let mut at = 1;
    while let Some(word) = words.get(at) {
        at += match *word {
            // With nothing behind it, it is no init's call.
            "--" => return if at + 1 < words.len() { at + 1 } else { 0 },
            option if INIT_OPTIONS_WITH_VALUE.contains(&option) => 2,
            option if option.starts_with('-') => 1,
            _ => return 0,
        };
    }
    0
}

/// The object of that name, made where there is none.
fn object<'a>(of: &'a mut JsonMap, name: &str) -> Result<&'a mut JsonMap, OciError> {
    let value = of.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut().ok_or_else(|| OciError::Config(format!("{name}: not an object")))
}

/// The array of that name, made where there is none.
fn array<'a>(of: &'a mut JsonMap, name: &str) -> Result<&'a mut Vec<Value>, OciError> {
    let value = of.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = json!([]);
    }
    value.as_array_mut().ok_or_else(|| OciError::Config(format!("{name}: not an array")))
}
