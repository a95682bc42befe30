// SPDX-License-Identifier: MIT OR Apache-2.0

//! Who has access: the token, logins in the browser, and the limit of failed attempts.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::rand::{getrandom, GetRandomFlags};
use subtle::ConstantTimeEq;

/// Logins in the browser at the same time. A further login ends the one that expires first.
const MAX_LOGINS: usize = 64;
/// Failed attempts of an address that need no wait.
const ATTEMPTS: u32 = 10;
/// Addresses with failed attempts that the limit remembers.
const MAX_ADDRESSES: usize = 1024;

/// Why an attempt was refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The token is wrong.
    Wrong,
    /// Too many attempts failed. The next one is possible after this time.
    TooMany(Duration),
    /// The kernel gave no random number.
    NoRandom,
}

/// How a request was authorized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Login {
    /// By the token in the request.
    Token,
    /// By the cookie with this value.
    Cookie(String),
}

pub(crate) struct Auth {
    token: Vec<u8>,
    lasts: Duration,
    /// After so long, an address has one attempt more.
    interval: Duration,
    logins: Mutex<BTreeMap<String, Instant>>,
    /// For each address, when all of its attempts are available again.
    failures: Mutex<HashMap<IpAddr, Instant>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns what a limit counts as one address: a host has usually all addresses of an IPv6 network of 64 bits.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

impl Auth {
    pub(crate) fn new(token: &str, lasts: Duration, interval: Duration) -> Self {
        Self {
            token: token.as_bytes().to_vec(),
            lasts,
            interval,
            logins: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    /// Checks the token that a client at `address` sent.
    pub(crate) fn check(&self, address: IpAddr, token: &str, now: Instant) -> Result<(), Refusal> {
        let address = network(address);
        let mut failures = locked(&self.failures);
        let last = self.interval * (ATTEMPTS - 1);
        let available = failures.get(&address).copied().unwrap_or(now).max(now);
        let early = available.duration_since(now).saturating_sub(last);
        if !early.is_zero() {
            // The token is not compared, so that guessing is not faster than the limit.
            return Err(Refusal::TooMany(early));
        }
        if bool::from(self.token.as_slice().ct_eq(token.as_bytes())) {
            return Ok(());
        }
        if failures.len() >= MAX_ADDRESSES {
            failures.retain(|_, available| *available > now);
        }
        if failures.len() >= MAX_ADDRESSES && !failures.contains_key(&address) {
            let first = failures.iter().min_by_key(|(_, available)| **available);
            if let Some(address) = first.map(|(address, _)| *address) {
                failures.remove(&address);
            }
        }
        failures.insert(address, available + self.interval);
        Err(Refusal::Wrong)
    }

    /// Logs a browser in. Returns the value of the cookie.
    pub(crate) fn log_in(&self, address: IpAddr, token: &str, now: Instant) -> Result<String, Refusal> {
        self.check(address, token, now)?;
        let mut random = [0; 32];
        match getrandom(&mut random, GetRandomFlags::empty()) {
            Ok(count) if count == random.len() => {}
            _ => return Err(Refusal::NoRandom),
        }
        let digits = |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from_digit(digit.into(), 16).unwrap_or('0'));
        let value: String = random.iter().flat_map(digits).collect();
        let mut logins = locked(&self.logins);
        logins.retain(|_, expires| *expires > now);
        if logins.len() >= MAX_LOGINS {
            let first = logins.iter().min_by_key(|(_, expires)| **expires);
            if let Some(value) = first.map(|(value, _)| value.clone()) {
                logins.remove(&value);
            }
        }
        logins.insert(value.clone(), now + self.lasts);
        Ok(value)
    }

    /// Ends a login.
    pub(crate) fn log_out(&self, value: &str) {
        locked(&self.logins).remove(value);
    }

    /// Whether a login is valid.
    pub(crate) fn is_valid(&self, login: &Login, now: Instant) -> bool {
        match login {
            Login::Token => true,
            Login::Cookie(value) => locked(&self.logins).get(value).is_some_and(|expires| *expires > now),
        }
    }

    /// Returns how long a login lasts.
    pub(crate) fn lasts(&self) -> Duration {
        self.lasts
    }
}

/// Returns the value of the cookie `wanted` in a `Cookie` header.
pub(crate) fn cookie<'a>(header: &'a str, wanted: &str) -> Option<&'a str> {
    header
        .split(';')
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(name, _)| *name == wanted)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";
    const INTERVAL: Duration = Duration::from_secs(6);

    fn auth() -> Auth {
        Auth::new(TOKEN, Duration::from_secs(60), INTERVAL)
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn a_login_expires() {
        let (auth, now) = (auth(), Instant::now());
        let login = Login::Cookie(auth.log_in(address(1), TOKEN, now).unwrap());
        assert!(auth.is_valid(&login, now + Duration::from_secs(59)));
        assert!(!auth.is_valid(&login, now + Duration::from_secs(60)));
        assert!(!auth.is_valid(&Login::Cookie("0".repeat(64)), now));
        assert!(!auth.is_valid(&Login::Cookie(String::new()), now));
    }

    #[test]
    fn a_logout_ends_one_login() {
        let (auth, now) = (auth(), Instant::now());
        let [first, second] = [1, 2].map(|_| auth.log_in(address(1), TOKEN, now).unwrap());
        assert_ne!(first, second);
        auth.log_out(&first);
        assert!(!auth.is_valid(&Login::Cookie(first), now));
        assert!(auth.is_valid(&Login::Cookie(second), now));
    }

    #[test]
    fn tokens_of_another_length_are_wrong() {
        let (auth, now) = (auth(), Instant::now());
        for wrong in ["", "0", "0123456789abcde", "0123456789abcdeF", "0123456789abcdef0"] {
            assert_eq!(auth.check(address(1), wrong, now), Err(Refusal::Wrong), "{wrong}");
        }
    }

    #[test]
    fn failed_attempts_of_an_address_are_limited() {
        let (auth, now) = (auth(), Instant::now());
        for _ in 0..ATTEMPTS {
            assert_eq!(auth.check(address(1), "wrong", now), Err(Refusal::Wrong));
        }
        assert_eq!(auth.check(address(1), "wrong", now), Err(Refusal::TooMany(INTERVAL)));
        assert_eq!(auth.check(address(1), TOKEN, now), Err(Refusal::TooMany(INTERVAL)));
        assert_eq!(
            auth.check(address(2), TOKEN, now),
            Ok(()),
            "another address is not limited"
        );
        let later = now + INTERVAL;
        assert_eq!(auth.check(address(1), "wrong", later), Err(Refusal::Wrong));
        assert_eq!(auth.check(address(1), TOKEN, later), Err(Refusal::TooMany(INTERVAL)));
        assert_eq!(auth.check(address(1), TOKEN, later + INTERVAL), Ok(()));
        let much_later = later + INTERVAL * (ATTEMPTS + 1);
        for _ in 0..ATTEMPTS {
            assert_eq!(auth.check(address(1), "wrong", much_later), Err(Refusal::Wrong));
        }
    }

    #[test]
    fn addresses_of_one_network_share_the_limit() {
        let (auth, now) = (auth(), Instant::now());
        for host in 0..ATTEMPTS {
            let address = format!("2001:db8::{host:x}").parse().unwrap();
            assert_eq!(auth.check(address, "wrong", now), Err(Refusal::Wrong));
        }
        let refused = auth.check("2001:db8::ffff".parse().unwrap(), TOKEN, now);
        assert!(matches!(refused, Err(Refusal::TooMany(_))));
        assert_eq!(auth.check("2001:db8:0:1::1".parse().unwrap(), TOKEN, now), Ok(()));
        let mapped = "::ffff:192.0.2.7".parse().unwrap();
        for _ in 0..ATTEMPTS {
            assert_eq!(auth.check(mapped, "wrong", now), Err(Refusal::Wrong));
        }
        assert!(matches!(auth.check(address(7), TOKEN, now), Err(Refusal::TooMany(_))));
    }

    #[test]
    fn memory_is_bounded() {
        let (auth, now) = (auth(), Instant::now());
        for number in 0..2 * MAX_ADDRESSES as u32 {
            let address = IpAddr::from((0x0a00_0000 + number).to_be_bytes());
            assert_eq!(auth.check(address, "wrong", now), Err(Refusal::Wrong));
        }
        assert_eq!(locked(&auth.failures).len(), MAX_ADDRESSES);
        let logins: Vec<String> = (0..MAX_LOGINS as u64 + 1)
            .map(|second| {
                let now = now + Duration::from_millis(second);
                auth.log_in(address(1), TOKEN, now).unwrap()
            })
            .collect();
        assert_eq!(locked(&auth.logins).len(), MAX_LOGINS);
        assert!(!auth.is_valid(&Login::Cookie(logins[0].clone()), now));
        assert!(auth.is_valid(&Login::Cookie(logins[1].clone()), now));
    }

    #[test]
    fn the_cookie_is_found_between_others() {
        assert_eq!(cookie("a=1; login=xyz; b=2", "login"), Some("xyz"));
        assert_eq!(cookie("xlogin=xyz", "login"), None);
        assert_eq!(cookie("", "login"), None);
    }
}
