//! Certificates for servers and clients of the tests.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// The group ffdhe2048 of RFC 7919: qemu-nbd looks for a new one at every start, for seconds, if it
/// is not given any.
const GROUP: &str = "-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
";

/// An authority, and a directory with all that it signed, under the names that the servers look
/// for.
pub struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new one. Its own certificate is `ca-cert.pem`.
    pub fn new(directory: PathBuf) -> Authority {
        std::fs::create_dir_all(&directory).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "swaptide test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        std::fs::write(directory.join("ca-cert.pem"), params.self_signed(&key).unwrap().pem())
            .unwrap();
        std::fs::write(directory.join("dh-params.pem"), GROUP).unwrap();
        Authority { directory, issuer: Issuer::new(params, key) }
    }

    /// Signs `NAME-cert.pem` for a host; its key is `NAME-key.pem`.
    pub fn sign(&self, name: &str, host: &str) {
        let mut params = CertificateParams::new([host.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, host);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.directory.join(format!("{name}-cert.pem")), certificate.pem()).unwrap();
        std::fs::write(self.directory.join(format!("{name}-key.pem")), key.serialize_pem())
            .unwrap();
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }
}
