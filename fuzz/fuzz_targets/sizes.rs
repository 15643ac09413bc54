//! Sizes, devices as `--swap` takes them, URLs of exports.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swaptide_host::nbd::Url;
use swaptide_host::swap::spec::{self, DeviceKind};
use swaptide_host::units::{SizeError, human, human_count, parse_bytes, parse_share};

const RAM: u64 = 1 << 34;

fuzz_target!(|text: &str| {
    match (parse_bytes(text), parse_share(text, RAM)) {
        (Ok(bytes), share) => {
            assert_eq!(share, Ok(bytes), "without a percentage both are the same");
            assert!(bytes > 0 && bytes < 1 << 63);
            let _ = (human(bytes), human_count(bytes));
            // What is written for people is read again, and near what it was.
            let again = parse_bytes(&human(bytes)).expect("a size for people is a size") as f64;
            assert!(
                (again / bytes as f64 - 1.0).abs() < 0.06 || bytes < 1024,
                "{bytes} became {again}"
            );
        }
        (Err(SizeError::Percent(_)), Ok(share)) => assert!(share > 0 && share <= RAM * 100),
        (Err(error), share) => {
            assert!(!error.to_string().contains('\n'), "one line");
            assert!(share.is_err() || matches!(error, SizeError::Percent(_)));
        }
    }
    match spec::parse(text) {
        Ok(device) => {
            assert!(device.priority.is_none_or(|priority| (-1..=32767).contains(&priority)));
            let _ = device.name();
            match device.kind {
                DeviceKind::Zram { bytes, .. } => assert!(bytes >= spec::MIN_POOL_BYTES),
                DeviceKind::File { bytes, ref path } => {
                    assert!(
                        bytes.is_none_or(|bytes| bytes >= spec::MIN_FILE_BYTES)
                            && !path.as_os_str().is_empty()
                    );
                }
                DeviceKind::Block { ref path } => assert!(path.is_absolute()),
                DeviceKind::Nbd(ref url) => check(url),
            }
            match spec::absolute(text) {
                Ok(absolute) => {
                    let again = spec::parse(&absolute).expect("an absolute device is one");
                    assert_eq!(again.priority, device.priority);
                }
                // A URL is not rewritten: its relative paths are refused.
                Err(error) => {
                    assert!(matches!(device.kind, DeviceKind::Nbd(_)), "{error}");
                    assert!(error.to_string().contains("write absolute paths"), "{error}");
                }
            }
        }
        Err(error) => assert!(!error.to_string().contains('\n'), "one line: {error}"),
    }
    if let Ok(url) = text.parse::<Url>() {
        assert!(Url::is_meant(text));
        check(&url);
    }
});

/// What a URL is called is one line, and its whole text means the same.
fn check(url: &Url) {
    assert!(!url.to_string().contains('\n'));
    assert_eq!(url.whole().parse().as_ref(), Ok(url));
}
