#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// The library of a driver that is not there. FAKE_NVML=KIND:COUNT,... with the kinds h100, a100, v100, t4, b200, gb10
// (does not say its memory), h100mig (two slices); FAKE_NVML_INIT=ERROR, FAKE_NVML_LOST=INDEX, FAKE_NVML_ECC=COUNT (of
// GPU 2), FAKE_NVML_NOP2P=1, FAKE_NVML_BUSY=PID, FAKE_NVML_DRIVER=TEXT, FAKE_NVML_CUDA=NUMBER.
typedef int R;
typedef struct dev { int idx; char kind[16]; int mig; char uuid[64]; } dev;
static dev D[64]; static int n=0; static dev S[64]; static int ns=0;
static void setup(){ n=0; ns=0; const char*e=getenv("FAKE_NVML"); char b[512]; snprintf(b,512,"%s",e?e:"h100:8"); char*sv; char*t=strtok_r(b,",",&sv);
 while(t){ char k[16]; int c=1; sscanf(t,"%15[^:]:%d",k,&c); for(int i=0;i<c;i++){ D[n].idx=n; strcpy(D[n].kind,k); D[n].mig=0; sprintf(D[n].uuid,"GPU-%08x-1111-2222-3333-44444444%04x",0x1a2b0000+n*4097,n);
   if(!strcmp(k,"h100mig")){ for(int m=0;m<2;m++){ S[ns]=D[n]; S[ns].mig=1; sprintf(S[ns].uuid,"MIG-%08x-1111-2222-3333-44444444%04x",0x7a2b0000+ns*4097,ns); ns++; } }
   n++; } t=strtok_r(NULL,",",&sv);} }
R nvmlInitWithFlags(unsigned f){ const char*e=getenv("FAKE_NVML_INIT"); if(e) return atoi(e); setup(); return 0;}
R nvmlInit_v2(){ return nvmlInitWithFlags(0);} R nvmlInit(){return nvmlInit_v2();}
R nvmlShutdown(){return 0;}
const char* nvmlErrorString(R r){ return r==3?"Not Supported":r==9?"Driver Not Loaded":r==15?"GPU is lost":r==18?"Driver/library version mismatch":"Unknown Error";}
R nvmlDeviceGetCount_v2(unsigned*c){*c=n;return 0;}
R nvmlDeviceGetHandleByIndex_v2(unsigned i,dev**h){ if(i>=n) return 2; const char*l=getenv("FAKE_NVML_LOST"); if(l&&atoi(l)==(int)i) return 15; *h=&D[i]; return 0;}
R nvmlDeviceGetHandleByUUID(const char*u,dev**h){ for(int i=0;i<n;i++) if(!strcmp(D[i].uuid,u)){*h=&D[i];return 0;} for(int i=0;i<ns;i++) if(!strcmp(S[i].uuid,u)){*h=&S[i];return 0;} return 6;}
R nvmlDeviceGetDeviceHandleFromMigDeviceHandle(dev*m,dev**h){ *h=&D[m->idx]; return 0;}
R nvmlDeviceGetIndex(dev*d,unsigned*i){*i=d->idx;return 0;}
R nvmlDeviceGetName(dev*d,char*b,unsigned l){ snprintf(b,l,"%s",!strcmp(d->kind,"t4")?"Tesla T4":!strcmp(d->kind,"a100")?"NVIDIA A100-SXM4-80GB":!strcmp(d->kind,"v100")?"Tesla V100-SXM2-32GB":!strcmp(d->kind,"gb10")?"NVIDIA GB10":!strcmp(d->kind,"b200")?"NVIDIA B200":"NVIDIA H100 80GB HBM3"); return 0;}
typedef struct{unsigned long long total,freeb,used;} mem1;
R nvmlDeviceGetMemoryInfo(dev*d,mem1*m){ if(!strcmp(d->kind,"gb10")) return 3; unsigned long long t=!strcmp(d->kind,"t4")?15843721216ull:!strcmp(d->kind,"v100")?34079637504ull:!strcmp(d->kind,"b200")?191457984512ull:85520809984ull; if(d->mig) t=42140172288ull; m->total=t;m->used=600<<20;m->freeb=t-m->used;return 0;}
R nvmlDeviceGetCudaComputeCapability(dev*d,int*a,int*b){ *a=9;*b=0; if(!strcmp(d->kind,"t4")){*a=7;*b=5;} if(!strcmp(d->kind,"v100")){*a=7;*b=0;} if(!strcmp(d->kind,"a100")){*a=8;*b=0;} if(!strcmp(d->kind,"gb10")){*a=12;*b=1;} if(!strcmp(d->kind,"b200")){*a=10;*b=0;} return 0;}
R nvmlDeviceGetUUID(dev*d,char*b,unsigned l){ snprintf(b,l,"%s",d->uuid); return 0;}
typedef struct{unsigned pid; unsigned long long used; unsigned gi,ci;} proc;
R nvmlDeviceGetComputeRunningProcesses_v3(dev*d,unsigned*c,proc*p){ const char*b=getenv("FAKE_NVML_BUSY"); int want=b?1:0; if(!want){*c=0;return 0;} if(*c==0){*c=1;return 7;} p[0].pid=atoi(b); p[0].used=3ull<<30; p[0].gi=p[0].ci=-1; *c=1; return 0;}
typedef struct{unsigned gpu,memory;} rates;
R nvmlDeviceGetUtilizationRates(dev*d,rates*u){ if(d->idx) return 3; u->gpu=97; u->memory=30; return 0;}
R nvmlDeviceGetTemperature(dev*d,int sensor,unsigned*t){ *t=61+d->idx; return 0;}
typedef struct{char legacy[16]; unsigned domain,bus,device,pcid,subs; char busId[32];} pci;
R nvmlDeviceGetPciInfo_v3(dev*d,pci*p){ memset(p,0,sizeof*p); sprintf(p->legacy,"0000:%02X:00.0",0x1b+d->idx); sprintf(p->busId,"00000000:%02X:00.0",0x1b+d->idx); return 0;}
R nvmlSystemGetDriverVersion(char*b,unsigned l){ const char*e=getenv("FAKE_NVML_DRIVER"); snprintf(b,l,"%s",e?e:"550.54.15"); return 0;}
R nvmlSystemGetCudaDriverVersion(int*v){ const char*e=getenv("FAKE_NVML_CUDA"); *v=e?atoi(e):12040; return 0;}
R nvmlSystemGetCudaDriverVersion_v2(int*v){ return nvmlSystemGetCudaDriverVersion(v);}
R nvmlDeviceGetNvLinkState(dev*d,unsigned l,int*s){ if(l>=18||strncmp(d->kind,"h100",4)) return 3; *s=1; return 0;}
R nvmlDeviceGetTotalEccErrors(dev*d,int t,int c,unsigned long long*v){ if(!strcmp(d->kind,"t4")) return 3; const char*e=getenv("FAKE_NVML_ECC"); *v=e&&d->idx==2?atoi(e):0; return 0;}
R nvmlDeviceGetP2PStatus(dev*a,dev*b,int i,int*s){ const char*e=getenv("FAKE_NVML_NOP2P"); *s=e?5:0; return 0;}
R nvmlDeviceGetMigMode(dev*d,unsigned*c,unsigned*p){ *c=*p=!strcmp(d->kind,"h100mig"); return 0;}
R nvmlDeviceGetMaxMigDeviceCount(dev*d,unsigned*c){*c=7;return 0;}
R nvmlDeviceGetMigDeviceHandleByIndex(dev*d,unsigned i,dev**h){ for(int s=0;s<ns;s++) if(S[s].idx==d->idx && i--==0){*h=&S[s];return 0;} return 6;}
