//! In front of an OCI runtime, and as a hook of podman's.
//!
//! Engines call a runtime as they call `runc`. `create` and `run` name the container's directory
//! (`--bundle`, or the current one); there `config.json` is changed. Then the runtime is executed
//! with the words that came, whatever they were, so that it does all else.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::oci::container::Container;
use crate::oci::error::OciError;
use crate::oci::parts::HostParts;

/// Options of runtimes (runc, crun, youki) before their command whose value is the next word.
const WITH_VALUE: [&str; 7] =
    ["log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager"];
/// The file of a container's directory.
const FILE: &str = "config.json";

/// What a runtime was called with, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RuntimeCall {
    /// The directory of the container that it is to create.
    bundle: Option<PathBuf>,
    /// Where the engine reads, in JSON, why it did not.
    log: Option<PathBuf>,
}

impl RuntimeCall {
    fn read(words: &[OsString]) -> RuntimeCall {
        let mut call = RuntimeCall::default();
        let (mut log, mut is_json) = (None, false);
        let mut words = words.iter();
        let command = loop {
            let Some(word) = words.next() else { return call };
            let text = word.to_string_lossy();
            // Runtimes take one dash as two.
            let Some(option) = text.strip_prefix("--").or_else(|| text.strip_prefix('-')) else {
                break word;
            };
            let (name, value) = match option.split_once('=') {
                Some((name, value)) => (name, Some(OsString::from(value))),
                None if WITH_VALUE.contains(&option) => (option, words.next().cloned()),
                None => (option, None),
            };
            match name {
                "log" => log = value.map(PathBuf::from),
                "log-format" => is_json = value.is_some_and(|value| value == "json"),
                _ => {}
            }
        };
        call.log = log.filter(|_| is_json);
        if command == "create" || command == "run" {
            call.bundle = Some(bundle_of(words.as_slice()));
        }
        call
    }

    /// Tells the engine as the runtime would.
    fn tell(&self, error: &OciError) {
        let Some(path) = &self.log else { return };
        if let Ok(mut log) = File::options().append(true).create(true).open(path) {
            let _ =
                writeln!(log, "{}", json!({"level": "error", "msg": format!("swaptide: {error}")}));
        }
    }
}

/// The directory that `create` or `run` names.
fn bundle_of(words: &[OsString]) -> PathBuf {
    let mut found = PathBuf::from(".");
    for (at, word) in words.iter().enumerate() {
        let text = word.to_string_lossy();
        let option = text.strip_prefix("--").or_else(|| text.strip_prefix('-')).unwrap_or_default();
        match option.split_once('=') {
            Some(("bundle" | "b", path)) => found = path.into(),
            None if matches!(option, "bundle" | "b") => {
                found = words.get(at + 1).map_or(found, PathBuf::from);
            }
            _ => {}
        }
    }
    found
}

/// What the administrator permits.
#[derive(Clone, Copy, Debug, Default)]
pub struct OciPermissions {
    /// Variables of the container count as annotations do: an image may set them.
    pub environment: bool,
    /// A container may join the host's daemon by an annotation. It can then do to all of the host's
    /// runs what root can with `swaptide ctl`.
    pub groups: bool,
}

/// Changes the container that the words create, if it asks for that, and executes the runtime with
/// these words.
///
/// # Errors
/// Why the container is not created. It does not return otherwise.
pub fn run(runtime: &OsStr, words: &[OsString], permissions: OciPermissions) -> OciError {
    let call = RuntimeCall::read(words);
    let changed = call
        .bundle
        .as_deref()
        .map_or(Ok(()), |bundle| change_file(bundle, permissions, HostParts::find));
    let error = match changed {
        Ok(()) => OciError::Runtime(runtime.into(), Command::new(runtime).args(words).exec()),
        Err(error) => error,
    };
    call.tell(&error);
    error
}

/// Reads a `config.json`, and writes what podman is to start instead.
///
/// # Errors
/// Why the container is not to be started.
pub fn hook(
    mut input: impl Read,
    mut output: impl Write,
    permissions: OciPermissions,
) -> Result<(), OciError> {
    let file = |name: &str| {
        let name = PathBuf::from(name);
        move |error: io::Error| OciError::File(name, error)
    };
    let mut text = Vec::new();
    input.read_to_end(&mut text).map_err(file("standard input"))?;
    let changed = change(&text, Path::new("."), permissions, HostParts::find)?;
    output.write_all(changed.as_deref().unwrap_or(&text)).map_err(file("standard output"))
}

fn change_file(
    bundle: &Path,
    permissions: OciPermissions,
    parts: impl FnOnce() -> Result<HostParts, OciError>,
) -> Result<(), OciError> {
    let path = bundle.join(FILE);
    let fail = |error| OciError::File(path.clone(), error);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        // The runtime says that better.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(fail(error)),
    };
    let Some(changed) = change(&text, bundle, permissions, parts)? else { return Ok(()) };
    let mode = std::fs::metadata(&path).map_err(fail)?.permissions().mode();
    // Whole or not at all: the file is another one under the same name.
    let other = bundle.join(format!("{FILE}.swaptide-{}", std::process::id()));
    // It may have secrets among the variables.
    let mut options = File::options();
    let created = options.write(true).create_new(true).mode(0o600).open(&other);
    let written = created
        .and_then(|mut file| file.write_all(&changed))
        .and_then(|()| std::fs::set_permissions(&other, Permissions::from_mode(mode)))
        .and_then(|()| std::fs::rename(&other, &path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&other);
        fail(error)
    })
}

/// The changed text; `None` where nothing is to be changed.
fn change(
    text: &[u8],
    bundle: &Path,
    permissions: OciPermissions,
    parts: impl FnOnce() -> Result<HostParts, OciError>,
) -> Result<Option<Vec<u8>>, OciError> {
    let mut container = Container::read(text)?;
    let Some(request) = container.request(permissions.environment)? else { return Ok(None) };
    if request.group.is_some() && !permissions.groups {
        let why = "the administrator has to permit it (swaptide oci-runtime --groups, oci-hook \
            --groups), for the container can do what root can with swaptide ctl";
        return Err(OciError::Group(why.into()));
    }
    let is_changed = container.put_under(&request, &parts()?, bundle)?;
    Ok(is_changed.then(|| container.text()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn calls_of_engines_are_read() {
        let call = |line| RuntimeCall::read(&words(line));
        for (line, bundle, log) in [
            // As podman, Docker and containerd, and CRI-O call them.
            ("create --bundle /b --pid-file /b/pid 184a", Some("/b"), None),
            (
                "--root /r --log /b/log.json --log-format json create --bundle /b --pid-file /p 73",
                Some("/b"),
                Some("/b/log.json"),
            ),
            (
                "--root /r --systemd-cgroup --log=/l --log-format=json create --bundle=/b 73",
                Some("/b"),
                Some("/l"),
            ),
            ("run -b /b create", Some("/b"), None),
            ("create id", Some("."), None),
            ("--log /l create id", Some("."), None),
            ("--root create start id", None, None),
            ("delete --force create", None, None),
            ("exec --process /p run", None, None),
            ("--version", None, None),
        ] {
            let wanted = RuntimeCall { bundle: bundle.map(Into::into), log: log.map(Into::into) };
            assert_eq!(call(line), wanted, "{line}");
        }
        assert_eq!(RuntimeCall::read(&[]), RuntimeCall::default());
    }

    fn parts() -> Result<HostParts, OciError> {
        Ok(HostParts {
            command: "/usr/lib/swaptide/swaptide".into(),
            agent: "/usr/lib/swaptide/libswaptide_agent.so".into(),
            device: (10, 126),
            sockets: None,
        })
    }

    #[test]
    fn a_file_is_changed_whole_or_not_at_all() {
        let scratch = Scratch::new("oci");
        let (bundle, path) = (scratch.root(), scratch.path(FILE));
        let change = |text: &str| {
            std::fs::write(&path, text).expect("write");
            std::fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("mode");
            let result = change_file(bundle, OciPermissions::default(), parts)
                .map_err(|error| error.to_string());
            let mode = std::fs::metadata(&path).expect("file").permissions().mode();
            assert_eq!(mode & 0o777, 0o640);
            assert_eq!(std::fs::read_dir(bundle).expect("directory").count(), 1, "left behind");
            (std::fs::read_to_string(&path).expect("read"), result)
        };
        let plain = " {\"process\": {\"args\" : [\"x\"]},\n \"n\": 1.0, \"n\": 2} ";
        assert_eq!(change(plain), (plain.to_owned(), Ok(())), "byte for byte");
        for bad in [
            "{\"annotations\": {\"swaptide.ram\": \"lots\"}, \"process\": {\"args\": [\"x\"]}}",
            "{\"annotations\": {\"swaptide.ram\": \"1Gi\"}}",
            "{\"annotations\": {\"swaptide.ram\": \"1Gi\"}, \"process\": {\"args\": []}}",
            "{",
            "[]",
        ] {
            let (text, result) = change(bad);
            let error = result.expect_err(bad);
            assert!(text == bad && !error.contains('\n'), "{error}");
        }
        let (text, result) = change(
            "{\"annotations\": {\"swaptide.ram\": \"1Gi\"}, \"process\": {\"args\": [\"x\"]}}",
        );
        assert!(result == Ok(()) && text.contains("\"1073741824\""), "{text}");
        std::fs::remove_file(&path).expect("removed");
        assert!(
            change_file(bundle, OciPermissions::default(), parts).is_ok(),
            "the runtime says that it is missing"
        );
    }

    #[test]
    fn an_engine_reads_why_a_container_is_not_created() {
        let scratch = Scratch::new("oci-log");
        let annotations = "{\"annotations\": {\"swaptide.ram\": \"lots\"}}";
        std::fs::write(scratch.path(FILE), annotations).expect("write");
        let (bundle, log) = (scratch.root().display(), scratch.path("log"));
        let line = format!("--log {} --log-format json create --bundle {bundle} x", log.display());
        let error = run(OsStr::new("/no/such/runtime"), &words(&line), OciPermissions::default())
            .to_string();
        assert!(error.contains("swaptide.ram") && error.contains("lots"), "{error}");
        let told: serde_json::Value =
            serde_json::from_slice(&std::fs::read(log).expect("a log")).expect("a line");
        assert_eq!(
            (&told["level"], &told["msg"]),
            (&"error".into(), &format!("swaptide: {error}").into())
        );
        let error =
            run(OsStr::new("/no/such/runtime"), &words("state x"), OciPermissions::default())
                .to_string();
        assert!(error.contains("/no/such/runtime") && error.contains("--runtime"), "{error}");
    }

    #[test]
    fn a_hook_gives_back_what_it_read() {
        let text = include_bytes!("../../tests/oci/docker.json");
        let mut output = Vec::new();
        hook(&text[..], &mut output, OciPermissions::default()).expect("nothing to do");
        assert_eq!(output, text);
        let wrong = &b"{\"annotations\": {\"swaptide.ram\": \"5\"}}"[..];
        assert!(hook(wrong, &mut output, OciPermissions::default()).is_err() && output == text);
    }
}
