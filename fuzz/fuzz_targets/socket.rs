//! What processes of the tree ask the supervisor for, over its socket, with and without
//! descriptors.
#![no_main]

use std::fs::File;
use std::sync::{Arc, Mutex, OnceLock};

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::empty_segment;
use swaptide_host::control::agent_api::{AgentServer, Users};
use swaptide_host::control::fork_tracer::TracedForks;
use swaptide_host::swap::areas::{AreaOpener, Areas};
use swaptide_ipc::AgentRequest;
use swaptide_sys::AsFd;
use swaptide_sys::sock::Conn;

fuzz_target!(|data: &[u8]| {
    static COUNTER: OnceLock<(Mutex<AgentServer>, Arc<dyn AreaOpener>)> = OnceLock::new();
    let (counter, areas) = COUNTER.get_or_init(|| {
        let areas: Arc<dyn AreaOpener> = Arc::new(Areas::new(empty_segment().0));
        (Mutex::new(AgentServer::open(Users::All, true, true).expect("a socket")), areas)
    });
    let mut counter = counter.lock().expect("one thread");
    let (_, segment) = empty_segment();
    let Some((first, message)) = data.split_first() else { return };
    let client = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
    let file = File::open("/dev/null").expect("a file");
    let fds = [file.as_fd(), file.as_fd()];
    // An empty message is none.
    if message.is_empty()
        || client.send(&message[..message.len().min(256)], &fds[..usize::from(first % 3)]).is_err()
    {
        return;
    }
    let joined = counter.serve(segment, areas, None, &mut TracedForks::default());
    // Not answered: it is none.
    drop(counter.take_filters());
    let known =
        AgentRequest::from_byte(message[0]).filter(|request| message.len() == 1 + request.body());
    assert!(
        joined.is_empty() || known == Some(AgentRequest::Segment),
        "a client that asks for something else has not joined"
    );
    let (mut reply, mut got) = ([0; 64], [None, None]);
    if let Ok((length, fds)) = client.recv(&mut reply, &mut got)
        && length > 0
    {
        let known = known.expect("only what is a request is answered");
        assert!(reply[0] == message[0] && fds <= 1, "{known:?}");
        assert!(!known.is_shared(), "there is no pager of shared memory");
    }
});
