//! The CUDA driver, the GPUs, and the links to them.

use std::{path::Path, sync::mpsc, thread, time::Duration};

use kvlane_gpu::{CopyMethods, DRIVER_VARIABLE, DeviceInfo, Drivers, Gpu, NoDriver, detect};

use crate::{
    doctor::{
        files,
        finding::{Finding, Verdict},
    },
    size::Size,
};

/// How long the driver may take, because a broken driver may never answer.
const LIMIT: Duration = Duration::from_secs(30);

/// The driver's answer.
#[derive(Debug)]
pub(crate) enum Facts {
    /// No answer within [`LIMIT`].
    Silent,
    /// This machine has no driver, for this reason.
    Missing(NoDriver),
    /// `cuda`, or in tests `fake`, its GPUs, and how each two of them reach each other.
    Driver { name: &'static str, gpus: Vec<Device>, pairs: Vec<Pair> },
}

/// Two GPUs, by ordinal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    first: u32,
    second: u32,
    way: Way,
}

/// How two GPUs reach each other's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// A link of their own, such as NVLink.
    Link,
    Pcie,
    None,
}

/// A GPU with its PCIe link.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    /// The ways to copy, or the reason why the GPU cannot be opened.
    pub(crate) methods: Result<CopyMethods, String>,
    /// None if the kernel does not report it.
    pub(crate) link: Option<Link>,
}

/// A PCIe link, in the kernel's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    speed: String,
    speed_max: String,
    width: String,
    width_max: String,
}

/// Asks the driver, in a thread that is abandoned if no answer comes.
pub(crate) fn read(root: &Path, drivers: Drivers) -> Facts {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        // The receiver is gone if the answer took too long.
        let _ = sender.send(ask(drivers));
    });
    match receiver.recv_timeout(LIMIT) {
        Ok(Ok((name, mut gpus, pairs))) => {
            gpus.iter_mut().for_each(|gpu| gpu.link = link(root, &gpu.info.pci_bus_id));
            Facts::Driver { name, gpus, pairs }
        }
        Ok(Err(reason)) => Facts::Missing(reason),
        Err(_) => Facts::Silent,
    }
}

fn ask(drivers: Drivers) -> Result<(&'static str, Vec<Device>, Vec<Pair>), NoDriver> {
    let driver = detect(drivers)?;
    let mut pairs = Vec::new();
    let ordinals: Vec<u32> = driver.devices()?.iter().map(|info| info.ordinal).collect();
    for (index, first) in ordinals.iter().enumerate() {
        for second in &ordinals[index + 1..] {
            let reach = |from, to| driver.can_reach(from, to).unwrap_or(false);
            let way = match driver.is_linked(*first, *second).unwrap_or(false) {
                true => Way::Link,
                false if reach(*first, *second) && reach(*second, *first) => Way::Pcie,
                false => Way::None,
            };
            pairs.push(Pair { first: *first, second: *second, way });
        }
    }
    let open = |info: DeviceInfo| {
        // Opens it as the daemon does, and closes it at once.
        let opened = Gpu::open(driver.clone(), info.ordinal);
        let methods = opened.map(|gpu| gpu.methods().clone()).map_err(|error| error.to_string());
        Device { info, methods, link: None }
    };
    Ok((driver.name(), driver.devices()?.into_iter().map(open).collect(), pairs))
}

fn link(root: &Path, pci_bus_id: &str) -> Option<Link> {
    let file = |name: &str| files::text(root, &format!("sys/bus/pci/devices/{pci_bus_id}/{name}"));
    Some(Link {
        speed: file("current_link_speed")?,
        speed_max: file("max_link_speed")?,
        width: file("current_link_width")?,
        width_max: file("max_link_width")?,
    })
}

/// One finding for the driver, one for each GPU, and one for the ways between them.
pub(crate) fn judge(facts: &Facts) -> Vec<Finding> {
    match facts {
        Facts::Silent => vec![
            Finding::problem(
                "gpu driver",
                format!("the CUDA driver does not answer within {} s", LIMIT.as_secs()),
            )
            .means("`kvlane serve` would wait for it too")
            .advice("mend the driver (`nvidia-smi` must answer), or start the daemon with --gpu off"),
        ],
        Facts::Missing(reason) => vec![
            Finding::note("gpu driver", reason.to_string())
                .means("engines on GPUs are not served here; engines in host memory are")
                .advice(advice(reason)),
        ],
        Facts::Driver { name, gpus, pairs } => {
            let found = format!("{name}, {} GPU{}", gpus.len(), if gpus.len() == 1 { "" } else { "s" });
            let driver = match *name {
                "fake" => Finding::note("gpu driver", found)
                    .means("shared memory plays the GPUs, for tests; real ones are not used")
                    .advice(format!("unset {DRIVER_VARIABLE}")),
                _ => Finding::ok("gpu driver", found)
                    .means("`kvlane serve` pins its pool for these and copies for engines on them"),
            };
            let ways = judge_pairs(pairs);
            std::iter::once(driver).chain(gpus.iter().map(judge_gpu)).chain(ways).collect()
        }
    }
}

fn advice(reason: &NoDriver) -> String {
    match reason {
        NoDriver::Off | NoDriver::Unknown(_) => format!("unset {DRIVER_VARIABLE} to use the GPUs"),
        NoDriver::NoLibrary => {
            "where there are GPUs, install the NVIDIA driver; a container has to be given it, see docs/containers.md"
                .into()
        }
        NoDriver::TooOld(_) => "install a driver of CUDA 12 or newer".into(),
        NoDriver::NoDevice => {
            "where there are GPUs, see that CUDA_VISIBLE_DEVICES, or NVIDIA_VISIBLE_DEVICES of a container, does not \
             hide them"
                .into()
        }
        NoDriver::Failed(_) => "see what `nvidia-smi` says".into(),
    }
}

/// Whether bytes of direct hand-offs go from GPU to GPU. None for a single GPU.
fn judge_pairs(pairs: &[Pair]) -> Option<Finding> {
    let by = |way: Way| {
        let of_way = pairs.iter().filter(|pair| pair.way == way);
        of_way.map(|pair| format!("{}-{}", pair.first, pair.second)).collect::<Vec<_>>()
    };
    let words = [(Way::Link, "a link of their own"), (Way::Pcie, "PCIe"), (Way::None, "no way")];
    let found: Vec<String> = words
        .into_iter()
        .map(|(way, words)| (by(way), words))
        .filter(|(which, _)| !which.is_empty())
        .map(|(which, words)| match which.len() == pairs.len() {
            true => format!("each GPU and each other: {words}"),
            false => format!("{}: {words}", which.join(" ")),
        })
        .collect();
    let apart = by(Way::None);
    let subject = "gpu to gpu";
    Some(match (pairs.is_empty(), apart.is_empty()) {
        (true, _) => return None,
        (_, true) => Finding::ok(subject, found.join("; "))
            .means("direct hand-offs between engines of one user here go from GPU to GPU (cuda), also within one GPU"),
        (_, false) => Finding::note(subject, found.join("; "))
            .means(format!(
                "direct hand-offs between engines on {} go through pinned host memory and sockets",
                apart.join(" and ")
            ))
            .advice(
                "where it matters, put engines that hand over to each other on GPUs that reach each other; a virtual \
                 machine has to be given that",
            ),
    })
}

fn judge_gpu(gpu: &Device) -> Finding {
    let DeviceInfo { ordinal, name, total_bytes, pci_bus_id, compute_capability: (major, minor), .. } =
        &gpu.info;
    let subject = format!("gpu {ordinal}");
    let mut found =
        vec![format!("{name}, {}, compute capability {major}.{minor}, {pci_bus_id}", Size(*total_bytes))];
    let (mut means, mut advice) = (Vec::new(), Vec::new());
    let methods = match &gpu.methods {
        Ok(methods) => methods,
        Err(error) => {
            return Finding::problem(subject, format!("{}; it cannot be opened: {error}", found.concat()))
                .means("engines on it are not served; if it is the first one, `kvlane serve` does not start")
                .advice(
                    "see what `nvidia-smi` says: its memory may be full, or its compute mode exclusive; \
                     --gpu off serves engines in host memory only",
                );
        }
    };
    found.push(
        match (methods.batch, methods.kernel) {
            (true, true) => "batch copies and the copy kernel",
            (true, false) => "batch copies, no copy kernel",
            (false, true) => "the copy kernel, no batch copies",
            (false, false) => "no batch copies, no copy kernel",
        }
        .to_owned(),
    );
    if !methods.kernel {
        means.push("small pieces are copied without the kernel, which is slower");
        advice.push("the log of `kvlane serve` says why the kernel cannot be used");
    }
    if !methods.batch {
        means.push("copies are enqueued one by one, which is slower");
        advice.push("install a driver of CUDA 12.8 or newer");
    }
    if let Some(link) = &gpu.link {
        found.push(link.to_text());
        if link.is_narrow() {
            means.push("the link has fewer lanes than the GPU could use, so loads and saves are slower");
            advice
                .push("look again while the GPU works; if it stays so, see the slot, the riser and the BIOS");
        }
    }
    let verdict = if means.is_empty() { Verdict::Ok } else { Verdict::Note };
    Finding { subject, verdict, found: found.join("; "), means: means.join("; "), advice: advice.join("; ") }
}

impl Link {
    fn to_text(&self) -> String {
        let one = |speed: &str, width: &str| format!("{} x{width}", speed.trim_end_matches(" PCIe"));
        let now = one(&self.speed, &self.width);
        let most = one(&self.speed_max, &self.width_max);
        if now == most {
            format!("PCIe {now}")
        } else if self.speed != self.speed_max {
            format!("PCIe {now} now, {most} at most (an idle GPU lowers its link's speed)")
        } else {
            format!("PCIe {now} now, {most} at most")
        }
    }

    fn is_narrow(&self) -> bool {
        // Virtual machines may report nonsense, such as 0 or 255 lanes.
        let lanes = |width: &str| width.parse::<u32>().ok().filter(|lanes| (1..=32).contains(lanes));
        matches!((lanes(&self.width), lanes(&self.width_max)), (Some(now), Some(most)) if now < most)
    }
}

#[cfg(test)]
pub(crate) fn device(ordinal: u32, pci_bus_id: &str) -> Device {
    Device {
        info: DeviceInfo {
            ordinal,
            uuid: [ordinal as u8; 16],
            name: "NVIDIA H200".into(),
            total_bytes: 150_000_000_000,
            pci_bus_id: pci_bus_id.into(),
            compute_capability: (9, 0),
        },
        methods: Ok(CopyMethods { batch: true, kernel: true }),
        link: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::files::tree;

    const ID: &str = "0000:1b:00.0";

    fn with_link(speed: &str, width: &str) -> Finding {
        let folder = format!("sys/bus/pci/devices/{ID}");
        let files = [
            (format!("{folder}/current_link_speed"), format!("{speed}\n")),
            (format!("{folder}/max_link_speed"), "32.0 GT/s PCIe\n".into()),
            (format!("{folder}/current_link_width"), format!("{width}\n")),
            (format!("{folder}/max_link_width"), "16\n".into()),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, &**text)).collect();
        let gpu = Device { link: link(tree(&files).path(), ID), ..device(0, ID) };
        judge_gpu(&gpu)
    }

    #[test]
    fn a_gpu_in_good_order() {
        let found = with_link("32.0 GT/s PCIe", "16");
        assert_eq!(found.verdict, Verdict::Ok);
        let wanted = "NVIDIA H200, 150.0 GB, compute capability 9.0, 0000:1b:00.0; batch copies and the copy kernel; \
                      PCIe 32.0 GT/s x16";
        assert_eq!(found.found, wanted);
    }

    #[test]
    fn an_idle_link_is_told_and_not_complained_of() {
        let found = with_link("2.5 GT/s PCIe", "16");
        assert_eq!(found.verdict, Verdict::Ok);
        assert!(found.found.contains("2.5 GT/s x16 now, 32.0 GT/s x16 at most (an idle"), "{}", found.found);
    }

    #[test]
    fn missing_lanes_are_a_note_and_nonsense_of_a_virtual_machine_is_not() {
        let found = with_link("32.0 GT/s PCIe", "8");
        assert_eq!(found.verdict, Verdict::Note);
        assert!(found.found.contains("x8 now, 32.0 GT/s x16 at most"), "{}", found.found);
        assert!(found.means.contains("fewer lanes"));
        assert_eq!(with_link("Unknown", "0").verdict, Verdict::Ok);
    }

    #[test]
    fn a_link_that_the_kernel_does_not_tell_is_left_out() {
        assert_eq!(link(tree(&[]).path(), ID), None);
        assert!(!judge_gpu(&device(0, ID)).found.contains("PCIe"));
    }

    #[test]
    fn what_is_missing_for_copies_is_named() {
        let methods = Ok(CopyMethods { batch: false, kernel: false });
        let found = judge_gpu(&Device { methods, ..device(3, ID) });
        assert_eq!((&*found.subject, found.verdict), ("gpu 3", Verdict::Note));
        assert!(found.advice.contains("CUDA 12.8") && found.advice.contains("log"), "{}", found.advice);
    }

    #[test]
    fn a_gpu_that_cannot_be_opened_keeps_the_daemon_from_starting() {
        let found = judge_gpu(&Device { methods: Err("CUDA error 2".into()), ..device(0, ID) });
        assert_eq!(found.verdict, Verdict::Problem);
        assert!(found.found.contains("CUDA error 2") && found.advice.contains("--gpu off"));
    }

    #[test]
    fn gpus_that_do_not_reach_each_other_are_named() {
        let pair = |first, second, way| Pair { first, second, way };
        assert!(judge_pairs(&[]).is_none());
        let linked = judge_pairs(&[pair(0, 1, Way::Link)]).unwrap();
        assert_eq!(
            (linked.verdict, &*linked.found),
            (Verdict::Ok, "each GPU and each other: a link of their own")
        );
        let mixed = [pair(0, 1, Way::Link), pair(0, 2, Way::Pcie), pair(1, 2, Way::None)];
        let mixed = judge_pairs(&mixed).unwrap();
        assert_eq!(
            (mixed.verdict, &*mixed.found),
            (Verdict::Note, "0-1: a link of their own; 0-2: PCIe; 1-2: no way")
        );
        assert!(mixed.means.contains("between engines on 1-2 go through pinned"), "{}", mixed.means);
    }

    #[test]
    fn no_driver_is_a_note_and_a_silent_one_a_problem() {
        for reason in [
            NoDriver::Off,
            NoDriver::Unknown("x".into()),
            NoDriver::NoLibrary,
            NoDriver::TooOld("cuInit"),
            NoDriver::NoDevice,
        ] {
            let found = judge(&Facts::Missing(reason.clone()));
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].verdict, &found[0].found), (Verdict::Note, &reason.to_string()));
            assert!(!found[0].advice.is_empty());
        }
        assert_eq!(judge(&Facts::Silent)[0].verdict, Verdict::Problem);
    }

    #[test]
    fn the_driver_comes_first_and_the_fake_one_is_not_mistaken_for_a_real_one() {
        let gpus = vec![device(0, ID), device(1, "0000:1c:00.0")];
        let pairs = vec![Pair { first: 0, second: 1, way: Way::Pcie }];
        let facts = |name| Facts::Driver { name, gpus: gpus.clone(), pairs: pairs.clone() };
        let found = judge(&facts("cuda"));
        let subjects: Vec<&str> = found.iter().map(|each| &*each.subject).collect();
        assert_eq!(subjects, ["gpu driver", "gpu 0", "gpu 1", "gpu to gpu"]);
        assert_eq!((found[0].verdict, &*found[0].found), (Verdict::Ok, "cuda, 2 GPUs"));
        assert_eq!(judge(&facts("fake"))[0].verdict, Verdict::Note);
    }
}
