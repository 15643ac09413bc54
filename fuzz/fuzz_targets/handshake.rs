//! The negotiation with an NBD server that sends whatever the fuzzer likes.
#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use swaptide_host::nbd::handshake::Talk;
use swaptide_host::nbd::socket::DeadlineSocket;
use swaptide_host::nbd::{Connector, Url};

fuzz_target!(|data: &[u8]| {
    static CONNECTORS: OnceLock<[(Url, Connector); 2]> = OnceLock::new();
    let connectors = CONNECTORS.get_or_init(|| {
        ["nbd://localhost/export", "nbd://localhost"].map(|text| {
            let url: Url = text.parse().expect("a URL");
            (url.clone(), Connector::new(url).expect("no certificates are needed"))
        })
    });
    let Some((first, data)) = data.split_first() else { return };
    let (url, connector) = &connectors[usize::from(first % 2)];
    let no_tls = Err(swaptide_host::nbd::NbdError::NoRoots);
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    // All of it at once, more than a socket takes is never asked for; then nothing more.
    theirs.set_nonblocking(true).expect("nonblocking");
    let _ = theirs.write(data);
    theirs.shutdown(Shutdown::Write).expect("shutdown");
    let begun = Instant::now();
    let mut wire = DeadlineSocket::new(ours.into(), begun + Duration::from_secs(5));
    let talk = Talk { url, tls: &no_tls };
    match talk.negotiate(&mut wire) {
        Ok((agreed, session)) => {
            assert!(session.is_none(), "no certificates, and yet a session");
            if let Ok(export) = connector.export(&agreed) {
                assert!(
                    export.size >= 4096 && export.size % 4096 == 0 && export.size <= agreed.size
                );
                assert!(
                    export.longest >= 4096
                        && (1..=swaptide_store::nbd::MAX_CONNECTIONS).contains(&export.connections)
                );
            }
        }
        Err(error) => assert!(
            !error.to_string().chars().any(char::is_control),
            "what a server says is shown as text: {error:?}"
        ),
    }
    drop(wire);
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "a server that has hung up is not waited for"
    );
    let mut said = Vec::new();
    theirs.set_nonblocking(false).expect("blocking");
    let _ = theirs.read_to_end(&mut said);
    assert!(
        said.len() < 64 << 10,
        "{} bytes were said to a server that said {}",
        said.len(),
        data.len()
    );
});
