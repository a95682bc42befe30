// SPDX-License-Identifier: MIT OR Apache-2.0

//! Providers that do not have enough space for a request, and the holders of their buffers.

use std::fmt;

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::types::{human_size, Provider};

/// The most holders of one provider that an error's text names.
const MAX_NAMED: usize = 3;

/// A process that holds buffers of a provider, and their total size.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// Process id and name, such as `pid 812 (ib_write_bw)`.
    pub owner: String,
    /// Number of buffers.
    pub buffers: usize,
    /// Size of these buffers in bytes.
    pub size: u64,
}

/// A provider that does not have enough space for a request, and the holders of its buffers.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct FullProvider {
    /// The provider, with its size and free bytes.
    pub provider: Provider,
    /// The processes that hold its buffers, those with the most bytes first; `None` if this program may not read the
    /// list, which only root can.
    pub holders: Option<Vec<Holder>>,
}

impl FullProvider {
    /// Returns the providers whose verdict is too little space. `table` is the module's list of buffers, if this
    /// program may read the list.
    pub(crate) fn of(verdicts: &[abi::p2pmem_verdict], providers: &[Provider], table: Option<&str>) -> Vec<Self> {
        let too_small = |v: &&abi::p2pmem_verdict| {
            matches!(
                v.code,
                abi::P2PMEM_VERDICT_TOO_SMALL | abi::P2PMEM_VERDICT_FULL | abi::P2PMEM_VERDICT_FRAGMENTED
            )
        };
        let all = table.map(holders);
        verdicts
            .iter()
            .filter(too_small)
            .filter_map(|verdict| providers.iter().find(|p| p.id == verdict.provider))
            .map(|provider| Self {
                provider: provider.clone(),
                holders: all.as_ref().map(|all| {
                    let here = all.iter().filter(|(addr, _)| *addr == provider.addr);
                    here.map(|(_, holder)| holder.clone()).collect()
                }),
            })
            .collect()
    }
}

impl fmt::Display for FullProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { provider, holders } = self;
        write!(f, "{} has {}", provider.place(), human_size(provider.size))?;
        if provider.kernel_reserve > 0 {
            write!(
                f,
                " (without {} that the kernel reserves)",
                human_size(provider.kernel_reserve)
            )?;
        }
        if provider.free == provider.size {
            return write!(f, ", all free");
        }
        write!(f, ", {} free", human_size(provider.free))?;
        if provider.largest < provider.free {
            write!(f, " (largest piece {})", human_size(provider.largest))?;
        }
        let share = |holder: &Holder| format!("{} {}", holder.owner, human_size(holder.size));
        match holders {
            Some(holders) if !holders.is_empty() => {
                let named: Vec<_> = holders.iter().take(MAX_NAMED).map(share).collect();
                write!(f, ", used by {}", named.join(", "))?;
                match holders.len().saturating_sub(MAX_NAMED) {
                    0 => {}
                    more => write!(f, " and {more} more")?,
                }
            }
            None if provider.buffers > 0 => {
                write!(f, ", buffers: {} (run as root to see their owners)", provider.buffers)?;
            }
            _ => {}
        }
        match (provider.pinned, provider.scrubbing) {
            (0, 0) => Ok(()),
            (pinned, 0) => write!(f, ", {} of freed buffers still in use", human_size(pinned)),
            (pinned, scrubbing) => write!(
                f,
                ", {} of freed buffers not cleared yet",
                human_size(pinned.saturating_add(scrubbing))
            ),
        }
    }
}

/// Sums the module's list of buffers by provider and owner. The first line of `table` names the columns. The last
/// column is the owner, which can contain spaces. Ignores lines that do not have the columns.
pub(crate) fn holders(table: &str) -> Vec<(PciAddr, Holder)> {
    let mut lines = table.lines();
    let header: Vec<_> = lines.next().unwrap_or_default().split(' ').collect();
    let column = |name: &str| header.iter().position(|h| *h == name);
    let (Some(function), Some(size), Some("owner")) = (column("function"), column("size"), header.last().copied())
    else {
        return Vec::new();
    };
    let mut all: Vec<(PciAddr, Holder)> = Vec::new();
    for line in lines {
        let fields: Vec<_> = line.splitn(header.len(), ' ').collect();
        let (Some(Ok(addr)), Some(Ok(bytes)), Some(owner)) = (
            fields.get(function).map(|f| f.parse::<PciAddr>()),
            fields.get(size).map(|s| s.parse::<u64>()),
            fields.get(header.len() - 1),
        ) else {
            continue;
        };
        match all.iter_mut().find(|(a, h)| *a == addr && h.owner == *owner) {
            Some((_, holder)) => {
                holder.buffers += 1;
                holder.size = holder.size.saturating_add(bytes);
            }
            None => all.push((
                addr,
                Holder {
                    owner: (*owner).to_owned(),
                    buffers: 1,
                    size: bytes,
                },
            )),
        }
    }
    all.sort_by(|a, b| b.1.size.cmp(&a.1.size).then_with(|| a.1.owner.cmp(&b.1.owner)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use crate::{Error, Request};

    const TABLE: &str = "id function size bar_offset mappings exports state owner\n\
        1 0000:03:00.0 1048576 0x0 1 0 live pid 8 (a b)\n\
        2 0000:03:00.0 209715200 0x100000 1 1 live pid 9 (ib_write_bw)\n\
        3 0000:08:00.0 4096 0x0 1 0 live pid 8 (a b)\n\
        4 0000:03:00.0 1048576 0xc900000 1 0 live pid 8 (a b)\n\
        a line that is none\n";

    #[test]
    fn the_module_s_list_is_summed_by_owner() {
        let all: Vec<_> = holders(TABLE)
            .into_iter()
            .map(|(addr, h)| (addr.bus, h.owner, h.buffers, h.size))
            .collect();
        let wanted = [
            (3, "pid 9 (ib_write_bw)".to_owned(), 1, 209_715_200),
            (3, "pid 8 (a b)".to_owned(), 2, 2 << 20),
            (8, "pid 8 (a b)".to_owned(), 1, 4096),
        ];
        assert_eq!(all, wanted);
        assert!(holders("").is_empty());
        assert!(holders("id size\n1 2\n").is_empty());
    }

    #[test]
    fn refusal_of_full_provider_names_bar_size_and_holders() {
        let fake = Fake::example();
        let device = fake.device();
        let request = Request::new(200 << 20).provider(1);
        let _held = device.alloc(&request).unwrap();
        fake.holders(Some(
            "id function size owner\n1 0000:03:00.0 209715200 pid 812 (ib_write_bw)\n",
        ));
        let error = device.alloc(&Request::new((56 << 20) + 1).provider(1)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOSPC));
        let text = error.to_string();
        assert!(
            text.ends_with("; 0000:03:00.0 BAR 2 has 256 MiB, 56 MiB free, used by pid 812 (ib_write_bw) 200 MiB"),
            "{text}"
        );
        assert!(error.remedy().unwrap().contains("request less"));
        assert!(error.reason().unwrap().contains("free"));

        let error = device.alloc(&Request::new((256 << 20) + 1).provider(1)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV));
        assert!(
            error
                .to_string()
                .contains("0000:03:00.0 BAR 2 has 256 MiB, 56 MiB free"),
            "{error}"
        );
        assert!(matches!(&error, Error::NoSpace { full, .. } if full.len() == 1 && full[0].provider.id == 1));

        // A program that is not root cannot read the list of buffers.
        fake.holders(None);
        let error = device.alloc(&Request::new(100 << 20).provider(1)).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("56 MiB free, buffers: 1 (run as root to see their owners)"),
            "{error}"
        );
    }

    #[test]
    fn holder_list_is_shortened_and_empty_provider_is_all_free() {
        let device = Fake::example().device();
        let provider = device.providers().unwrap().remove(0);
        let mut capacity = FullProvider {
            provider,
            holders: Some(Vec::new()),
        };
        assert_eq!(capacity.to_string(), "0000:03:00.0 BAR 2 has 256 MiB, all free");
        let holder = |n: u64| Holder {
            owner: format!("pid {n} (x)"),
            buffers: 1,
            size: n << 20,
        };
        capacity.holders = Some((1..=5).map(holder).collect());
        capacity.provider.free = 100 << 20;
        capacity.provider.largest = 50 << 20;
        capacity.provider.scrubbing = 1 << 20;
        capacity.provider.kernel_reserve = 1 << 20;
        assert_eq!(
            capacity.to_string(),
            "0000:03:00.0 BAR 2 has 256 MiB (without 1 MiB that the kernel reserves), 100 MiB free (largest piece \
             50 MiB), used by pid 1 (x) 1 MiB, \
             pid 2 (x) 2 MiB, pid 3 (x) 3 MiB and 2 more, 1 MiB of freed buffers not cleared yet"
        );
    }
}
