//! Changes of the `config.json` that engines write (`tests/oci`: podman 4.3 and Docker 20.10).

use super::*;

const FILES: [(&str, &[u8]); 9] = [
    ("podman", include_bytes!("../../../tests/oci/podman.json")),
    ("podman-init", include_bytes!("../../../tests/oci/podman-init.json")),
    ("podman-hostpid", include_bytes!("../../../tests/oci/podman-hostpid.json")),
    ("podman-privileged", include_bytes!("../../../tests/oci/podman-privileged.json")),
    ("podman-readonly-user", include_bytes!("../../../tests/oci/podman-readonly-user.json")),
    ("podman-userns", include_bytes!("../../../tests/oci/podman-userns.json")),
    ("docker", include_bytes!("../../../tests/oci/docker.json")),
    ("docker-init", include_bytes!("../../../tests/oci/docker-init.json")),
    ("docker-privileged", include_bytes!("../../../tests/oci/docker-privileged.json")),
];
const COMMAND: &str = "/run/.swaptide/swaptide";

fn parts() -> HostParts {
    HostParts {
        command: "/usr/lib/swaptide/swaptide".into(),
        agent: "/usr/lib/swaptide/libswaptide_agent.so".into(),
        device: (10, 126),
        sockets: Some("/run/swaptide".into()),
    }
}

fn file(name: &str) -> Value {
    let (_, text) = FILES.iter().find(|(known, _)| *known == name).expect("a file");
    serde_json::from_slice(text).expect("JSON")
}

/// The file with these annotations besides, and that changed.
fn changed(mut before: Value, annotations: &[(&str, &str)]) -> Result<(Value, Value), String> {
    if before["annotations"].is_null() {
        before["annotations"] = json!({});
    }
    for (key, value) in annotations {
        before["annotations"][*key] = (*value).into();
    }
    let mut container = Container::read(before.to_string().as_bytes()).expect("an object");
    let request = container.request(false).map_err(|error| error.to_string())?.expect("a request");
    let once = container.put_under(&request, &parts(), Path::new("/no/such/bundle"));
    assert!(once.map_err(|error| error.to_string())?, "changed");
    let again = container.put_under(&request, &parts(), Path::new("/no/such/bundle"));
    assert!(!again.expect("sound"), "changed twice");
    let after = serde_json::from_slice(&container.text()).expect("JSON");
    Ok((before, after))
}

fn sound(name: &str) -> (Value, Value) {
    changed(file(name), &[("swaptide.ram", "256Mi")]).expect(name)
}

fn words(config: &Value) -> Vec<&str> {
    let words = config["process"]["args"].as_array().expect("args");
    words.iter().map(|word| word.as_str().expect("a text")).collect()
}

/// The elements of an array that another one has not.
fn added(before: &Value, after: &Value) -> Vec<Value> {
    let (before, after) = (before.as_array(), after.as_array().expect("an array"));
    let had = before.map_or(0, Vec::len);
    assert_eq!(before.map_or(&[][..], Vec::as_slice), &after[..had], "what was there stays");
    after[had..].to_vec()
}

#[test]
fn nothing_else_of_a_file_changes() {
    for (name, _) in FILES {
        let (before, mut after) = sound(name);
        let has_it = name.ends_with("privileged");
        assert_eq!(added(&before["mounts"], &after["mounts"]).len(), 2, "{name}");
        let devices = added(&before["linux"]["devices"], &after["linux"]["devices"]);
        assert_eq!(devices.is_empty(), has_it, "{name}: an engine has given it");
        let rules = |config: &Value| config["linux"]["resources"]["devices"].clone();
        let rule = json!({"allow": true, "type": "c", "major": 10, "minor": 126, "access": "rw"});
        // podman has none for a container with a user namespace of its own.
        let has_rules = name != "podman-userns";
        assert_eq!(rules(&before).is_null(), !has_rules, "{name}");
        if has_rules {
            assert_eq!(added(&rules(&before), &rules(&after)), [rule], "{name}");
            after["linux"]["resources"]["devices"] = rules(&before);
        }
        after["mounts"] = before["mounts"].clone();
        after["process"]["args"] = before["process"]["args"].clone();
        match before["linux"].get("devices") {
            Some(devices) => after["linux"]["devices"] = devices.clone(),
            None => drop(after["linux"].as_object_mut().expect("linux").remove("devices")),
        }
        assert_eq!(before, after, "{name}");
    }
}

#[test]
fn the_program_gets_the_command_in_front() {
    let (_, after) = sound("podman");
    let run =
        [COMMAND, "run", "--ram", "268435456", "--no-daemon", "--swap", "zram:268435456", "--"];
    assert_eq!(words(&after), [&run[..], &["/bin/echo", "hi"]].concat());
    // A relative name stays one: it is looked up in the container, with its variables.
    assert_eq!(words(&sound("podman-readonly-user").1)[run.len()..], ["echo", "hi"]);
    for (name, first) in [("podman-init", "/run/podman-init"), ("docker-init", "/sbin/docker-init")]
    {
        let (_, after) = sound(name);
        assert_eq!(words(&after)[..3], [first, "--", COMMAND], "the init stays the first process");
    }
    for (line, at) in [
        (&["/usr/bin/tini", "-g", "--", "server", "--", "x"][..], 3),
        (&["/sbin/tini", "server"][..], 0),
        // The program's own dashes.
        (&["tini", "node", "app.js", "--", "--port", "80"][..], 0),
        (&["tini", "-e", "143", "--", "server"][..], 4),
        (&["dumb-init", "--rewrite", "15:3", "--", "server"][..], 4),
        (&["/usr/bin/tini", "--"][..], 0),
        (&["server", "--", "tini"][..], 0),
        (&["./tinier", "--", "x"][..], 0),
    ] {
        assert_eq!(behind_init(line), at, "{line:?}");
    }
}

#[test]
fn parts_are_read_only_and_the_device_is_the_users() {
    let (before, after) = sound("podman-readonly-user");
    let mounts = added(&before["mounts"], &after["mounts"]);
    let options = json!(["bind", "ro", "nosuid", "nodev"]);
    assert!(mounts.iter().all(|mount| mount["options"] == options && mount["type"] == "bind"));
    assert_eq!(mounts[0]["destination"], COMMAND);
    assert_eq!(mounts[1]["source"], "/usr/lib/swaptide/libswaptide_agent.so");
    let device = json!({
        "path": "/dev/userfaultfd", "type": "c", "major": 10, "minor": 126,
        "fileMode": 0o600, "uid": 1000, "gid": 1000,
    });
    assert_eq!(added(&before["linux"]["devices"], &after["linux"]["devices"]), [device]);
}

fn mount(kind: &str, options: Value) -> Value {
    json!({"destination": "/tmp", "type": kind, "options": options})
}

#[test]
fn a_swap_file_is_left_out_where_there_is_no_place_for_it() {
    let bundle = crate::testing::Scratch::new("oci-root");
    let has = |config: &Value| {
        let container = Container::read(config.to_string().as_bytes()).expect("an object");
        container.has_swap_place(bundle.root())
    };
    let mut config = json!({"root": {"path": "rootfs"}});
    assert!(!has(&config), "there is no such directory");
    std::fs::create_dir_all(bundle.path("rootfs/var/tmp")).expect("directory");
    assert!(has(&config));
    config["root"]["readonly"] = true.into();
    assert!(!has(&config));
    config["mounts"] = json!([mount("bind", json!(["rbind", "rw"]))]);
    assert!(has(&config));
    config["mounts"] = json!([mount("bind", json!(["rbind", "ro"]))]);
    assert!(!has(&config));
    config["mounts"] = json!([mount("tmpfs", json!(["rw"]))]);
    assert!(!has(&config), "that is memory");
    // What an annotation names counts.
    let areas = [("swaptide.ram", "256Mi"), ("swaptide.swap", "zram:64M file:/data:1G")];
    let (_, after) = changed(file("podman"), &areas).expect("sound");
    let two = ["--swap", "zram:64M", "--swap", "file:/data:1G", "--"];
    assert_eq!(words(&after)[5..10], two);
}

#[test]
fn a_group_needs_the_hosts_numbers_of_processes() {
    let group = [("swaptide.ram", "256Mi"), ("swaptide.group", "/web")];
    let (before, after) = changed(file("podman-hostpid"), &group).expect("sound");
    let run = ["run", "--ram", "268435456", "--need-daemon", "--group", "/web", "--", "echo", "hi"];
    assert_eq!(words(&after)[0], COMMAND);
    assert_eq!(words(&after)[1..], run);
    let line = json!("SWAPTIDE_DIRECTORY=/run/.swaptide/sockets");
    let name = json!("SWAPTIDE_CONTAINER=container=217c72951fc5");
    assert_eq!(added(&before["process"]["env"], &after["process"]["env"]), [line, name]);
    assert_eq!(added(&before["mounts"], &after["mounts"])[2]["source"], "/run/swaptide");
    let refused = |config: Value, part: &str| {
        let error = changed(config, &group).expect_err(part);
        assert!(error.contains(part) && error.contains("swaptide.group"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    };
    refused(file("podman"), "--pid=host");
    let mut user = file("podman-hostpid");
    user["process"]["user"]["uid"] = 1000.into();
    refused(user, "root");
    let mut none = Container::read(file("podman-hostpid").to_string().as_bytes()).expect("JSON");
    let mut request = none.request(false).expect("sound").expect("a request");
    request.group = Some(crate::cgroup::tree::GroupPath::root());
    let parts = HostParts { sockets: None, ..parts() };
    let error = none.put_under(&request, &parts, Path::new("/")).expect_err("no daemon");
    assert!(error.to_string().contains("swaptide daemon"), "{error}");
}

#[test]
fn a_budget_above_the_memory_limit_is_refused() {
    let error = changed(file("podman"), &[("swaptide.ram", "401Mi")]).expect_err("above");
    assert!(error.contains("\"401Mi\"") && error.contains("400M"), "{error}");
    assert!(changed(file("podman"), &[("swaptide.ram", "400Mi")]).is_ok(), "as much");
    let mut without = file("podman");
    without["linux"]["resources"]["memory"]["limit"] = (-1).into();
    assert!(changed(without, &[("swaptide.ram", "1Gi")]).is_ok(), "no limit");
}
