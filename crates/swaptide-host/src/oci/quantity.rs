//! Sizes as Kubernetes reads them: `256Mi` is 256 times 1024 times 1024, `256M` is 256 million.
//!
//! Owns the grammar: a number, with decimals if you like, then one of `Ki Mi Gi Ti Pi Ei`, `k M G T
//! P E`, or an exponent (`e9`). Elsewhere swaptide's sizes are powers of 1024, whatever the letter
//! ([`units`](crate::units)); an annotation stands next to limits that are read as here.

use thiserror::Error;

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum QuantityError {
    /// Not a number with a unit.
    #[error("{0:?} is not a size; write it like 256Mi, 1.5Gi or 512M")]
    Syntax(String),
    /// Thousandths of a byte, which are a mistake for `M`.
    #[error("{0:?} is in thousandths of a byte; write M or Mi")]
    Milli(String),
    /// Lower or upper case as Kubernetes does not have it.
    #[error("{0:?}: there is no unit K; write Ki, or k for 1000")]
    Kilo(String),
    /// More than fits 63 bits.
    #[error("{0:?} is too large; write a size below 8Ei")]
    TooLarge(String),
}

/// Bytes of a size, the fraction of a byte rounded up.
///
/// # Errors
/// See [`QuantityError`].
pub(crate) fn parse_quantity(text: &str) -> Result<u64, QuantityError> {
    let syntax = || QuantityError::Syntax(text.to_owned());
    let too_large = || QuantityError::TooLarge(text.to_owned());
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(syntax());
    }
    let (factor, exponent) = match unit {
        "m" => return Err(QuantityError::Milli(text.to_owned())),
        "K" => return Err(QuantityError::Kilo(text.to_owned())),
        _ => unit_of(unit).ok_or_else(syntax)?,
    };
    let digits = format!("{whole}{}", fraction.trim_end_matches('0'));
    let places = fraction.trim_end_matches('0').len();
    // Eighteen places are more than any size needs, and fit the arithmetic below.
    if places > 18 {
        return Err(syntax());
    }
    let digits: u128 = digits.parse().map_err(|_| too_large())?;
    let scale = 10u128.pow(places as u32);
    let power = 10u128.checked_pow(exponent).ok_or_else(too_large)?;
    let parts = digits.checked_mul(factor).and_then(|parts| parts.checked_mul(power));
    let bytes = parts.ok_or_else(too_large)?.div_ceil(scale);
    u64::try_from(bytes).ok().filter(|bytes| *bytes <= i64::MAX as u64).ok_or_else(too_large)
}

/// The factor of a unit, and a power of ten that comes to it.
fn unit_of(unit: &str) -> Option<(u128, u32)> {
    let at = |letters: &str, letter: &str| letters.find(letter).map(|at| at as u32 + 1);
    if unit.is_empty() {
        return Some((1, 0));
    }
    if let Some(exponent) = unit.strip_prefix(['e', 'E'])
        && exponent.starts_with(|c: char| c.is_ascii_digit() || c == '+')
    {
        let digits = exponent.strip_prefix('+').unwrap_or(exponent);
        let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        return Some((1, digits.parse().ok().filter(|_| plain)?));
    }
    match unit.strip_suffix('i') {
        Some(letter) if letter.len() == 1 => Some((1 << (10 * at("KMGTPE", letter)?), 0)),
        None if unit.len() == 1 => Some((1, 3 * at("kMGTPE", unit)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_kubernetes_reads_them() {
        for (text, bytes) in [
            ("256Mi", 256 << 20),
            ("1Gi", 1 << 30),
            ("512M", 512_000_000),
            ("268435456", 268_435_456),
            ("1.5Gi", 3 << 29),
            ("0.5Gi", 1 << 29),
            (".5Gi", 1 << 29),
            ("64.Mi", 64 << 20),
            ("100k", 100_000),
            ("100Ki", 102_400),
            ("1e9", 1_000_000_000),
            ("1E3", 1000),
            ("2E", 2_000_000_000_000_000_000),
            ("2Ei", 2 << 60),
            ("1e+6", 1_000_000),
            ("0.3", 1),
            ("1.00000000000000000000000000Mi", 1 << 20),
        ] {
            assert_eq!(parse_quantity(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_kubernetes_does_not_have_is_refused() {
        for text in [
            "", "Mi", ".", "lots", "256 Mi", " 256Mi", "256mi", "256MB", "256MiB", "-1Mi", "+1Mi",
            "1.2.3Mi", "50%", "1e", "1e-3", "1e++3", "1i", "1ki", "0x10", "1Zi", "10u", "10n",
            "2é",
        ] {
            let refused = parse_quantity(text);
            assert_eq!(refused, Err(QuantityError::Syntax(text.to_owned())), "{text}");
        }
        assert_eq!(parse_quantity("256m"), Err(QuantityError::Milli("256m".to_owned())));
        assert_eq!(parse_quantity("256K"), Err(QuantityError::Kilo("256K".to_owned())));
        for text in ["8Ei", "1e40", "1e400", "99999999999999999999999999999999999999999", "1e19"] {
            let refused = parse_quantity(text);
            assert_eq!(refused, Err(QuantityError::TooLarge(text.to_owned())), "{text}");
        }
    }
}
